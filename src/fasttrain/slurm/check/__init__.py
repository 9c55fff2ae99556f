"""What would fail in a job, found before it is sent."""
