"""The command line: ``topk-registry COMMAND ...``."""
