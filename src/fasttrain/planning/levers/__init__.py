"""One decider per lever."""
