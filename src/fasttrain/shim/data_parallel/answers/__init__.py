"""Rank 0's answers to questions on which ranks could differ: time, files, commands, randomness."""
