"""What is watched while the script trains: progress, NaN/Inf, checkpoints."""
