"""The processes of a run: found by its mark and by descent, and ended. Standard library only."""
