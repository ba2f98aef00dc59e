"""Base classes of losses: targets, options, precision and reduction."""
