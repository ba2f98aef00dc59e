"""The commands of the command line, one module each with ``main(argv) -> int``."""
