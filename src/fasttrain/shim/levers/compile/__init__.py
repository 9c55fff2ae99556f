"""torch.compile in place."""
