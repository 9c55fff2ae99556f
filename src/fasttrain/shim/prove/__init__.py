"""One of several runs of a script that are compared while they take turns."""
