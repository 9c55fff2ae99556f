"""The files of a run: written atomically, private, in folders that only the user can write to."""
