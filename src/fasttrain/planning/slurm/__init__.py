"""Makes the parameters of a SLURM job from the user's settings."""
