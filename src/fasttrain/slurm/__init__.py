"""A run on a SLURM cluster: sent through submitit, planned on the nodes, followed to its end."""
