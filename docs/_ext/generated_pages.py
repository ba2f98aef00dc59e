"""Pages made from the code while the site is built: one a loss, the command line, and the public names."""

import contextlib
import inspect
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import matplotlib as mpl
import pictures
from docutils import nodes
from matplotlib import pyplot as plt
from sphinx.application import Sphinx

import topk_registry as tr
from topk_registry.cli.commands import commands
from topk_registry.cli.main import main as command_line
from topk_studies import plot

DOCS = Path(__file__).parents[1]


def losses() -> list[str]:
    return [info.name for info in map(tr.loss_info, tr.list_losses()) if info.distribution == "topk-registry"]


def table_of_losses() -> dict[str, list[str]]:
    """Cells of the table in losses.md: name, paper, purpose, options, cost."""
    table = re.search(r"<!-- losses -->\n(.*?)<!-- /losses -->", (DOCS / "losses.md").read_text(), re.DOTALL)
    assert table, "docs/losses.md has no table of losses"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1].splitlines()[2:]]
    return {cells[0].strip("`"): cells for cells in rows}


def picture(name: str, folder: Path) -> None:
    """The loss and its slope against the label's score."""
    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    plot.label_scores(axes, name)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(folder / f"{name}.svg", transparent=True)
    plt.close(figure)


def level_sets(name: str, folder: Path) -> str:
    """The part of a loss's page with its level sets; nothing where it has none, as it takes no three classes."""
    if not (folder / f"{name}-levels.png").exists():
        return ""
    return f"""```{{image}} {name}-levels.png
:width: 240px
:alt: level sets of {name} over three scores that trade off
```

Its level sets over three scores with a fixed sum, the label's corner circled; dark is low (`topk-registry plot --loss
{name} --landscape`).
"""


def loss_page(name: str, cells: list[str], levels: str) -> str:
    builder = tr.get_loss_builder(name)
    module, attribute = builder.__module__, builder.__qualname__
    paper, purpose, cost = cells[1], cells[2], cells[4]
    return f"""# {name}

{purpose[0].upper()}{purpose[1:]}.

```{{image}} {name}.svg
:class: loss-picture
:alt: {name} and its slope against the label's score
```

The loss of one row of {plot.CLASSES} classes and its slope, against the label's score. The other
scores go from 2 down to -2.

{levels}
```sh
timm train --loss {name}
```

Paper: {paper}. Cost: a forward and a backward pass take {cost} times as long as those of `F.cross_entropy`
([how this was measured](../costs.md)).

```{{eval-rst}}
.. autoclass:: {module}.{attribute}
   :no-members:
```
"""


def command_page() -> Iterator[str]:
    """The help of every command of this distribution, as the command line prints it."""
    yield "# The command line\n\n`topk-registry COMMAND ...`, also installed as `timm`.\n"
    for info in commands.infos():
        if info.distribution != "topk-registry":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            command_line([info.name, "--help"])
        yield f"\n## {info.name}\n\n{info.summary}\n\n```text\n{printed.getvalue().strip()}\n```\n"


def api_page() -> Iterator[str]:
    yield "# Public names\n\nEverything below is imported from `topk_registry`.\n\n```{eval-rst}\n"
    for name in sorted(tr.__all__):
        value = getattr(tr, name)
        kind = "autoclass" if inspect.isclass(value) else "autofunction"
        yield f".. {kind}:: topk_registry.{name}\n"
        yield "   :members:\n\n" if kind == "autoclass" and not issubclass(value, BaseException) else "\n"
    yield "```\n"


def costs_page() -> str:
    environment = json.loads((DOCS / "results" / "losses.json").read_text())["environment"]
    told = "".join(f"| {name} | {value} |\n" for name, value in environment.items() if not isinstance(value, dict))
    return f"""# How the costs were measured

`python -m tests.bench losses` times every loss beside `F.cross_entropy`, all taking turns in one run, and writes
`docs/results/losses.json`. The tables quote ratios of medians from that report, which was made here:

| | |
|---|---|
{told}"""


def write(app: Sphinx) -> None:
    pages = Path(app.srcdir) / "generated"
    (pages / "losses").mkdir(parents=True, exist_ok=True)
    os.environ["COLUMNS"] = "100"  # the width of a help page
    rows = table_of_losses()
    for page in (pages / "losses").glob("*.md"):
        if page.stem not in losses():
            page.unlink()  # of a loss that has gone since the last build
    with mpl.rc_context({"svg.hashsalt": "topk_registry", "svg.fonttype": "path", "font.size": 9}):
        pictures.draw(pages / "pictures")
        for name in losses():
            picture(name, pages / "losses")
            _drawn(["--loss", name, "--landscape"], pages / "losses" / f"{name}-levels.png")
            _write(pages / "losses" / f"{name}.md", loss_page(name, rows[name], level_sets(name, pages / "losses")))
    for name, command in gallery():
        _drawn(command, pages / "gallery" / f"{name}.png")
    _write(pages / "commands.md", "".join(command_page()))
    _write(pages / "api.md", "".join(api_page()))
    _write(pages / "costs.md", costs_page())


def gallery() -> Iterator[tuple[str, list[str]]]:
    """Names of the gallery's pictures, and the arguments of the command above each."""
    page = (DOCS / "guide" / "gallery.md").read_text()
    for name, command in re.findall(r"<!-- gallery: (\w+) -->\n```sh\ntopk-registry plot (.*) --output", page):
        yield name, command.split()


def _drawn(arguments: list[str], path: Path) -> None:
    """A picture of ``topk-registry plot``, the slowest to make: once; none where a loss cannot be drawn so."""
    if not path.exists():
        with contextlib.redirect_stdout(io.StringIO()):
            command_line(["plot", *arguments, "--output", str(path)])


def _write(path: Path, text: str) -> None:
    """Only where it changed, so that a second build is quick."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def links_of_the_repository(app: Sphinx, path: Path, page: str, content: list[str]) -> None:
    """Turn links of README and CONTRIBUTING: pages of the site are linked, other files are shown as text."""

    def turned(found: re.Match[str]) -> str:
        text, target = found.groups()
        name = target.removeprefix("docs/").removesuffix(".md").lower()  # CONTRIBUTING.md is the page contributing
        if "://" in target or target.startswith("#"):
            return found[0]
        return f"[{text}](/{name}.md)" if target.endswith(".md") and name in app.env.found_docs else text

    content[0] = re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", turned, content[0])


def links_out_of_the_site(app: Sphinx, page: str, content: list[str]) -> None:
    """Show as text what a page of docs/ links to outside docs/."""
    folder = (Path(app.srcdir) / page).parent

    def turned(found: re.Match[str]) -> str:
        text, target = found.groups()
        path = (folder / target.partition("#")[0]).resolve()
        return found[0] if "://" in target or path.is_relative_to(Path(app.srcdir).resolve()) else text

    content[0] = re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", turned, content[0])
    if page == "losses":  # names of the table lead to their pages, which exist on the site only
        content[0] = re.sub(r"(?m)^\| `(\w+)` \|", r"| [`\1`](generated/losses/\1.md) |", content[0])


def list_of_pages(app: Sphinx, error: Exception | None) -> None:
    """Write llms.txt (llmstxt.org): every page with its title and first sentence, for programs that read."""
    if error is not None or app.builder.format != "html":
        return
    lines = [
        "# topk_registry",
        "",
        "> Losses for image classifiers by name, and exact top-k probabilities.",
        "",
        "## Pages",
        "",
    ]
    for page in sorted(app.env.found_docs):
        first = next(app.env.get_doctree(page).findall(nodes.paragraph), None)
        told = (
            "" if first is None else ": " + re.split(r"(?<=[.?!:])\s", first.astext().replace("\n", " "))[0].rstrip(":")
        )
        lines.append(f"- [{app.env.titles[page].astext()}]({page}.html){told}")
    (Path(app.outdir) / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write)
    app.connect("build-finished", list_of_pages)
    app.connect("include-read", links_of_the_repository)
    app.connect("source-read", links_out_of_the_site)
    return {"parallel_read_safe": True}
