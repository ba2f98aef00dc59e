"""One module a command: ``main(argv) -> int``."""
