"""Whether a run hangs, and where its ranks are."""
