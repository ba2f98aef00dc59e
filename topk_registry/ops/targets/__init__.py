"""Targets of every kind as masses on labels."""
