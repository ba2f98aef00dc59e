"""The k-subset operator over classes that come in chunks."""
