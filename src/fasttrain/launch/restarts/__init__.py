"""The attempts of a run that is restarted after a failure."""
