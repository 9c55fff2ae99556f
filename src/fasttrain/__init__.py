"""fasttrain: makes an unmodified PyTorch training script run fast, and proves what took effect."""

__version__ = "0.1.0"
