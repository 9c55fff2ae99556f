"""Hostile input for ``tests/fuzz``, and how it is judged what fasttrain makes of it."""
