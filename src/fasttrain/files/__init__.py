"""The files of a run: written whole, for the user alone, in folders that nobody else can write."""
