"""What makes several ranks of one script one run."""
