"""Output for people: one module per topic."""
