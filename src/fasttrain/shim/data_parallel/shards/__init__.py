"""Models whose parameters, gradients and optimizer states are sharded (--strategy fsdp)."""
