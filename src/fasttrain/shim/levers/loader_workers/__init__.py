"""Worker processes for DataLoaders that have none."""
