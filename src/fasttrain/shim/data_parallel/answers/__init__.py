"""Rank 0 answers what processes may answer differently: time, files, commands, random numbers."""
