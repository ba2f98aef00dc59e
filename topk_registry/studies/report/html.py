"""One self-contained HTML page of all studies in a folder."""

from collections.abc import Sequence
from pathlib import Path

from topk_registry.studies.study import Section


def write_html(sections: Sequence[Section], path: Path) -> None:
    """The report as a single file."""
    raise NotImplementedError
