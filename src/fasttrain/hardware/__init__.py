"""What machine is this? Probes that never import torch, one vendor per file."""
