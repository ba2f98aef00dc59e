"""The step in torch operations."""
