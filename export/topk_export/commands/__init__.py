"""Commands of the export package. The function ``main(argv)`` of a command's module returns the exit status."""
