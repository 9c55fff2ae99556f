"""The run directory: where it is, and who holds it."""
