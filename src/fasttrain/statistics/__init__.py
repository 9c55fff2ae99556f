"""Decides from numbers that runs have measured: pairs of times, curves of losses."""
