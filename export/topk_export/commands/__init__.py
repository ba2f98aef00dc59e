"""Commands, one module each, with ``main(argv) -> int``."""
