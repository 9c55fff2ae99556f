"""What is printed for a person: one card per topic."""
