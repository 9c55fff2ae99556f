"""Dynamic loss scaling for fp16."""
