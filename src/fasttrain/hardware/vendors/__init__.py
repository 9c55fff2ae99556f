"""Probes of devices, one vendor per file."""
