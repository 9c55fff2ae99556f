"""Levers of the data-parallel strategy."""
