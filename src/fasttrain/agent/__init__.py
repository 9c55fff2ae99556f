"""torchrun's agent process, which starts the workers of one node."""
