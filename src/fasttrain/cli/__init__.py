"""The command line: parsing and printing, no decisions. typer and rich live here only."""
