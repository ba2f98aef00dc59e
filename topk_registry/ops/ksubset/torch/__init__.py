"""The k-subset operator in plain torch operations."""
