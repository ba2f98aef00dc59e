"""The project's own losses, one paper per file, found only through entry points."""
