"""The split of a root's call: each rank computes its rows, and the script gets all."""
