"""Why a run failed: evidence from each rank, and a table of causes."""
