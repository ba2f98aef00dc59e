"""Times and peak memory of several contestants, side by side in one run."""
