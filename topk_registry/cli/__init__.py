"""The command line: ``topk-registry COMMAND ...``."""

from topk_registry.cli.parser import (
    INTERRUPTED,
    ArgumentParser,
    ParseOptions,
    missed,
    parse_pairs,
    positive,
    within,
    words_of,
)

__all__ = ["INTERRUPTED", "ArgumentParser", "ParseOptions", "missed", "parse_pairs", "positive", "within", "words_of"]
