"""Facts about the user's code, from its source; nothing of it is imported or run."""
