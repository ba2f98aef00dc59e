"""The command line: ``topk-registry COMMAND ...``."""

from topk_registry.cli.parser import ArgumentParser, ParseOptions, positive

__all__ = ["ArgumentParser", "ParseOptions", "positive"]
