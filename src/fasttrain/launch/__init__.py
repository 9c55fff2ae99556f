"""Makes a plan happen: run directory, processes, their output and signals, and the receipt."""
