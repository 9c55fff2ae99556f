"""One rank of a node reads the batches of a DataLoader, and all ranks of the node get them."""
