"""Whether a run hangs, and where its ranks stand."""
