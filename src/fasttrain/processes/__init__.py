"""The processes of a run: find them by mark and descent, and end them. Standard library only."""
