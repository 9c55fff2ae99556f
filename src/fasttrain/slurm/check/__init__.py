"""``fasttrain slurm --check``: find what would fail in a job before it is sent."""
