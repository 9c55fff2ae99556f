"""The checks, a topic per file; each judges an examination and changes nothing."""
