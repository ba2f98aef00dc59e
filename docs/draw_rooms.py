"""Draw the rooms of the project in docs/architecture.md: ``python docs/draw_rooms.py``.

Floors are the layers of import-linter's contracts in pyproject.toml, arrows are imports. An arrow that follows from
others is left out, so that the picture stays readable.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PICTURE = re.compile(r"(?<=<!-- rooms -->\n).*?(?=<!-- /rooms -->)", re.DOTALL)
PUBLIC = "topk_registry"  # the package itself: the public names, resolved on first use
PACKAGES = ("topk_registry", "topk_export", "topk_plugins", "topk_studies")


def floors() -> Iterator[tuple[str, list[str]]]:
    """Title and rooms of each floor, the highest first."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    contracts = {contract["id"]: contract["layers"] for contract in settings["contracts"] if "layers" in contract}
    yield "plug-ins", ["topk_plugins", "topk_studies"]
    yield "export", [f"topk_export.{room}" for layer in contracts["export"] for room in _rooms(layer)]
    for number, layer in enumerate(contracts["core"], 1):
        yield f"core {number}", [f"{PUBLIC}.{room}" for room in _rooms(layer)]


def _rooms(layer: str) -> list[str]:
    return re.split(r"\s*[|:]\s*", layer)


def arrows(rooms: list[str]) -> set[tuple[str, str]]:
    """Return pairs of rooms (importer, imported)."""
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)
    promised = grimp.build_graph(*PACKAGES, cache_dir=None).find_modules_directly_imported_by(PUBLIC)

    def room(module: str) -> str:
        inside = (name for name in rooms if name != PUBLIC and f"{module}.".startswith(f"{name}."))
        return next(inside, module)

    found = {(PUBLIC, room(module)) for module in promised}
    for module in graph.modules - {PUBLIC}:
        found |= {(room(module), room(target)) for target in graph.find_modules_directly_imported_by(module)}
    return {(a, b) for a, b in found if a != b and a in rooms and b in rooms}


def reduced(pairs: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """The fewest arrows with the same paths."""
    below: dict[str, set[str]] = {}

    def reach(name: str) -> set[str]:
        if name not in below:
            below[name] = set()  # a cycle, which the contracts forbid, ends here
            below[name] = {b for a, b in pairs if a == name} | {c for a, b in pairs if a == name for c in reach(b)}
        return below[name]

    return {(a, b) for a, b in pairs if not any(b in reach(c) for x, c in pairs if x == a and c != b)}


def picture() -> str:
    """The rooms in Mermaid, which GitHub draws."""
    levels = list(floors())
    named = {room: room.replace(".", "_") for _, rooms in levels for room in rooms} | {PUBLIC: "public"}
    lines = ["```mermaid", "flowchart TB"]
    for title, rooms in levels:
        lines.append(f'  subgraph {title.replace(" ", "_").replace("-", "_")}["{title}"]')
        lines += [f'    {named[room]}["{room.removeprefix("topk_registry.")}"]' for room in rooms]
        lines.append("  end")
    lines.append(f'  public(["import {PUBLIC}: the public names"])')
    lines += [f"  {named[a]} --> {named[b]}" for a, b in sorted(reduced(arrows(list(named))))]
    return "\n".join([*lines, "```"]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(PICTURE.sub(lambda _: picture(), PAGE.read_text()))
