"""The commands, one per file; none decides anything."""
