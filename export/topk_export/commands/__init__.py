"""Commands of the export package. Each module has the function ``main(argv)``, which returns the exit status."""
