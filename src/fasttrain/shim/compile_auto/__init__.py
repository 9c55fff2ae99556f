"""Compiles models in the background, and switches to them when that pays: ``--compile auto``."""
