"""Other people's training scripts, run with a registered loss."""
