"""What is wrong with a machine or a script, why, and how to fix it."""
