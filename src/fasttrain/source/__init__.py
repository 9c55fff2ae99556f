"""What does the user's code do? Read from its source; nothing of it is imported or run."""
