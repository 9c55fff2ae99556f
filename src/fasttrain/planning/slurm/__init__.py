"""What the user wants of SLURM, turned into the parameters of a job."""
