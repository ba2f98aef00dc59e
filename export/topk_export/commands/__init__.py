"""Commands of the export package, one module per command. ``main(argv)`` runs a command and returns the exit status."""
