"""Frozen dataclasses that cross a border between packages or processes; standard library only."""
