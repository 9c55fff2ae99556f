"""The receipt of a run, from the reports of its ranks."""
