"""Programs that `doctor` starts in the user's interpreter."""
