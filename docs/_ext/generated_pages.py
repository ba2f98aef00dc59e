"""Pages made from the code while the site is built: one a loss, the command line, and the public names."""

import contextlib
import inspect
import io
import json
import os
import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pictures
from docutils import nodes
from matplotlib import pyplot as plt
from sphinx.application import Sphinx

import topk_registry as tr
from topk_registry.cli.commands import commands
from topk_registry.cli.main import main as command_line
from topk_registry.registry.options import CONTEXT, tuning_grid
from topk_registry.registry.ranges import Interval, option_ranges
from topk_studies import plot
from topk_studies.engine import registered

DOCS = Path(__file__).parents[1]


OURS = "topk-registry:*"
COMMON = ("weight", "reduction", "label_smoothing", "ignore_index")
ADVICE = {"Use when": "Use it when", "Avoid when": "Take another when"}  # sections of docstrings, and headings of pages


def table_of_losses() -> dict[str, list[str]]:
    """Cells of the table in losses.md: name, paper, purpose, options, cost."""
    table = re.search(r"<!-- losses -->\n(.*?)<!-- /losses -->", (DOCS / "losses.md").read_text(), re.DOTALL)
    assert table, "docs/losses.md has no table of losses"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1].splitlines()[2:]]
    return {cells[0].strip("`"): cells for cells in rows}


def picture(name: str, folder: Path) -> str:
    """The part of a loss's page with the loss and its slope against the label's score; nothing where it takes none."""
    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    try:
        plot.label_scores(axes, name)
    except (TypeError, ValueError):  # a loss that needs options, or other targets
        return ""
    else:
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(folder / f"{name}.svg", transparent=True)
    finally:
        plt.close(figure)
    return f"""```{{image}} {name}.svg
:class: loss-picture
:alt: {name} and its slope against the label's score
```

The loss of one row of {plot.CLASSES} classes and its slope, against the label's score{_drawn_at(name)}. The other
scores go from 2 down to -2.
"""


def _drawn_at(name: str, **options: int) -> str:
    """The options that a picture is drawn with, in words: the defaults but for those given."""
    numbers = registered.numbers_of(name, **options)
    return f", at `{numbers}`" if numbers else ""


def level_sets(name: str, folder: Path) -> str:
    """The part of a loss's page with its level sets; nothing where it has none, as it takes no three classes."""
    if not (folder / f"{name}-levels.png").exists():
        return ""
    return f"""```{{image}} {name}-levels.png
:width: 240px
:alt: level sets of {name} over three scores that trade off
```

Its level sets over three scores with a fixed sum, the label's corner circled; dark is low (`topk-registry plot --loss
{name} --landscape`){_drawn_at(name, k=2)}.
"""


def advice(builder: Any) -> dict[str, str]:
    """Headings and text of the sections of a docstring that say when to use a loss and when not."""
    text = inspect.cleandoc(builder.__doc__ or "") + "\n"
    found = {}
    for section, heading in ADVICE.items():
        match = re.search(rf"^{section}:\n((?: {{4}}.*\n)+)", text, re.MULTILINE)
        if match:
            told = " ".join(match[1].split()).replace("``", "`")
            found[heading] = re.sub(r"`(\w+)`", lambda name: _linked(name[1]), told)
    return found


def _linked(name: str) -> str:
    ours = tr.is_loss(name) and tr.loss_info(name).distribution == "topk-registry"
    return f"[`{name}`]({name}.md)" if ours else f"`{name}`"


def options_table(builder: Any) -> str:
    """A row an option of its own: default, the values it may have, and those that are tried when it is tuned."""
    ranges, grid = option_ranges(builder), tuning_grid(builder)
    rows = [
        f"| `{name}` | {_shown(name, parameter.default)} | {_allowed(ranges.get(name))} | "
        f"{', '.join(f'`{value}`' for value in grid.get(name, ())) or '-'} |"
        for name, parameter in inspect.signature(builder).parameters.items()
        if name not in COMMON and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    if not rows:
        return "None of its own.\n"
    head = "| option | default | allowed | tried when tuned |\n|---|---|---|---|\n"
    told = "Give them as `--loss-opt OPTION=VALUE ...`, in Python by keyword: `create_loss(NAME, OPTION=VALUE)`."
    return head + "\n".join(rows) + f"\n\n{told} A round bracket excludes its end; n is the number of classes.\n"


STUDIED = {"smooth_topk_svm": "The default of tau was [chosen by a study](../../results/tau.md)."}  # of options


def _shown(name: str, default: Any) -> str:
    if name in CONTEXT:
        return "the trainer tells it"
    return "needed" if default is inspect.Parameter.empty else f"`{default}`"


def _allowed(values: Interval | tuple[Any, ...] | None) -> str:
    if values is None:
        return "see below"
    return f"`{values}`" if isinstance(values, Interval) else ", ".join(f"`{value}`" for value in values)


def loss_page(name: str, cells: list[str] | None, pictures: str) -> str:
    """The page of a loss; ``cells`` is its row in losses.md, which losses of other distributions have not."""
    builder, info = tr.get_loss_builder(name), tr.loss_info(name)
    purpose = cells[2] if cells else info.summary.rstrip(".") or f"A loss of {info.distribution or 'this process'}"
    told = advice(builder)
    flags = " --normalize-classifier" if "`normalize_classifier`" in purpose else ""
    parts = [f"# {name}", f"{purpose[0].upper()}{purpose[1:]}.", f"```sh\ntimm train --loss {name}{flags}\n```"]
    if told:
        parts.append("\n\n".join(f"**{heading}** {text[0].lower()}{text[1:]}" for heading, text in told.items()))
    parts += ["## Shape", pictures] if pictures else []
    parts += ["## Options", options_table(builder), STUDIED.get(name, ""), "## Definition", _definition(builder)]
    if cells:
        cost = f"a forward and a backward pass take {cells[4]} times as long as those of `F.cross_entropy`"
        cost = "not measured yet" if cells[4] == "-" else f"{cost} ([how this was measured](../costs.md))"
        parts.append(f"## Paper and cost\n\nPaper: {cells[1]}. Cost: {cost}.")
    return "\n\n".join(filter(None, parts)) + "\n"


def _definition(builder: Any) -> str:
    """Return autodoc's directive for a class or function; a factory without a name of its own has only a docstring."""
    if not hasattr(builder, "__qualname__"):
        return "```text\n" + (inspect.getdoc(builder) or repr(builder)) + "\n```"
    kind = "autoclass" if inspect.isclass(builder) else "autofunction"
    options = "   :no-members:\n" if inspect.isclass(builder) else ""
    return f"```{{eval-rst}}\n.. {kind}:: {builder.__module__}.{builder.__qualname__}\n{options}```"


def without_advice(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Leave out of a docstring what the page of a loss tells above it."""
    kept: list[str] = []
    inside = False
    for line in lines:
        if line.rstrip(":") in ADVICE and line.endswith(":"):
            inside = True
        elif not inside or (line and not line.startswith(" ")):
            inside = False
            kept.append(line)
    lines[:] = kept


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


NAMESPACES = sorted(
    (name for name in dir(tr) if inspect.ismodule(getattr(tr, name))), key=lambda name: (name == "errors", name)
)
TASKS = {  # the names of the package itself, by what they are for
    "Find and make a loss": ("list_losses", "create_loss", "loss_info", "is_loss", "get_loss_builder", "LossInfo"),
    "Train": ("normalize_classifier", "CosineClassifier", "mean_over_ranks", "LabelMixture", "use_backend"),
    "Train with very many classes": ("LinearSmoothTopK", "ChunkedUpdate", "SphericalLinear", "SphericalSGD"),
    "Predict": ("TopKHead", "TopKOutput", "TopKClassifier", "fit_temperature"),
    "Sets of classes as random variables": ("KSubset", "GumbelTopK", "PerturbedTopK"),
    "Write a loss": (
        "ClassificationLoss",
        "TopKLoss",
        "BatchLoss",
        "accepted_context",
        "register_loss",
        "refresh_plugins",
    ),
    "Errors": ("PluginError",),
}


def api_page() -> Iterator[str]:
    """The names of the package itself, and the way to those of its namespaces."""
    yield "# Public names\n\nEverything below is imported from `topk_registry`. "
    yield "Its namespaces have pages of their own:\n\n"
    yield "| namespace | content |\n|---|---|\n"
    for name in NAMESPACES:
        told = (inspect.getdoc(getattr(tr, name)) or "").partition("\n")[0].replace("``", "`")
        yield f"| [`topk_registry.{name}`](api/{name}.md) | {told} |\n"
    yield "\nThe losses are classes too, `from topk_plugins import SmoothTopKSVM`; [each has a page](../losses.md).\n"
    yield "\n```{toctree}\n:hidden:\n\n" + "".join(f"api/{name}\n" for name in NAMESPACES) + "```\n\n"
    placed = [name for names in TASKS.values() for name in names]
    public = [name for name in dir(tr) if name not in NAMESPACES and not name.startswith("__")]
    assert sorted(placed) == sorted(public), f"TASKS has {sorted(set(placed) ^ set(public))} too many or not at all"
    for task, names in TASKS.items():
        yield f"## {task}\n\n"
        yield from _documented("topk_registry", names)
        yield "\n"
    yield f"\n## Names of version 0.1\n\n{inspect.cleandoc(RENAMED)}\n\n| before | now |\n|---|---|\n"
    for old, new in tr._RENAMED.items():
        yield f"| `topk_registry.{old}` | `topk_registry.{new}` |\n"


RENAMED = """
They work for one more release, with a `DeprecationWarning` that names the new one; type checkers flag them already. A
function called `*_loss` now takes logits and a target and returns numbers, so `smooth_topk_loss` is another function
than before: its `reduction` is `"mean"` unless you say otherwise, where that of `smooth_topk_hinge` was `"none"`.
"""


def namespace_page(name: str) -> Iterator[str]:
    namespace = getattr(tr, name)
    told = (inspect.getdoc(namespace) or "").partition("\n")[0].replace("``", "`")
    yield f"# topk_registry.{name}\n\n{told}\n\n"
    yield from _documented(f"topk_registry.{name}", _errors_last(namespace))


def _errors_last(namespace: Any) -> list[str]:
    """The public names of a namespace in the order of the alphabet, errors after all others."""

    def order(name: str) -> tuple[bool, str]:
        value = getattr(namespace, name)
        return inspect.isclass(value) and issubclass(value, BaseException), name

    return sorted(namespace.__all__, key=order)


def _documented(module: str, names: Sequence[str]) -> Iterator[str]:
    """Autodoc's directives for names of a module."""
    yield "```{eval-rst}\n"
    for name in names:
        value = getattr(import_module(module), name)
        kind = "autoclass" if inspect.isclass(value) else "autofunction" if callable(value) else "py:data"
        yield f".. {kind}:: {module}.{name}\n"
        top, errors = module == "topk_registry", module == "topk_registry.errors"
        if not top and (name in dir(tr) or (not errors and name in tr.errors.__all__)):
            yield "   :no-index:\n"  # its entry is that of the other page
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
    names = tr.list_losses(app.config.topk_losses)
    for page in (pages / "losses").glob("*.md"):
        if page.stem not in names:
            page.unlink()  # of a loss that has gone since the last build
    with mpl.rc_context({"svg.hashsalt": "topk_registry", "svg.fonttype": "path", "font.size": 9}):
        pictures.draw(pages / "pictures")
        for name in names:
            _drawn(["--loss", name, "--landscape"], pages / "losses" / f"{name}-levels.png")
            shape = "\n".join((picture(name, pages / "losses"), level_sets(name, pages / "losses"))).strip()
            _write(pages / "losses" / f"{name}.md", loss_page(name, rows.get(name), shape))
    for name, command in gallery():
        _drawn(command, pages / "gallery" / f"{name}.png")
    _write(pages / "commands.md", "".join(command_page()))
    _write(pages / "api.md", "".join(api_page()))
    (pages / "api").mkdir(exist_ok=True)
    for name in NAMESPACES:
        _write(pages / "api" / f"{name}.md", "".join(namespace_page(name)))
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
    app.add_config_value("topk_losses", OURS, "env", description="wildcards over losses that have a page")
    app.connect("builder-inited", write)
    app.connect("autodoc-process-docstring", without_advice, priority=400)  # before napoleon reads its sections
    app.connect("build-finished", list_of_pages)
    app.connect("include-read", links_of_the_repository)
    app.connect("source-read", links_out_of_the_site)
    return {"parallel_read_safe": True}
