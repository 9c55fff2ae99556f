"""What each process of ours begins with; none of it imports torch."""
