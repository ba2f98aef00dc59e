"""The command line: ``topk-registry COMMAND ...``."""

from topk_registry.cli.parser import ArgumentParser, ParseOptions, parse_pairs, positive

__all__ = ["ArgumentParser", "ParseOptions", "parse_pairs", "positive"]
