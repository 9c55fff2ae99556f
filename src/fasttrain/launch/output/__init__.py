"""The output of a run, from its workers to the terminal and the logs."""
