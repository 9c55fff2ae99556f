"""torch_npu's fused optimizers."""
