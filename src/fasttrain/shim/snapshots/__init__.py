"""What a snapshot of a training run is made of, and how a run comes back to it."""
