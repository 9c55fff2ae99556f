"""One rank of a node reads the batches of a DataLoader for all ranks of the node."""
