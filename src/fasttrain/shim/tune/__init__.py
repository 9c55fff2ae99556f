"""Finds which levers make a script faster, while it trains."""
