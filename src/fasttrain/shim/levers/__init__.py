"""The changes that the shim makes in the worker, one lever per file."""
