"""Seams of torch, each patched in one place, and what listens there."""
