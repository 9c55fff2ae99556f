"""The start of each process that fasttrain runs; nothing here imports torch."""
