"""What a run prints and draws."""
