"""Sphinx extension that writes pages from the code: one page per loss, the command line, and the public names."""

import contextlib
import inspect
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from sphinx.application import Sphinx

import topk_export
import topk_registry as tr
from topk_registry.cli.commands import commands
from topk_registry.cli.main import main as command_line

DOCS = Path(__file__).parents[1]


def loss_picture(name: str, folder: Path) -> str:
    """Draw a loss and its gradient as functions of the label's logit, and return the Markdown that shows the picture.

    If the loss needs more arguments, or other targets than class indices, return an empty string.
    """
    others = torch.linspace(2, -2, 9, dtype=torch.float64)
    logits = torch.linspace(-4, 8, 121, dtype=torch.float64, requires_grad=True)
    rows = torch.cat((logits[:, None], others.expand(len(logits), -1)), 1)
    try:
        torch.manual_seed(0)
        values = tr.create_loss(name, reduction="none")(rows, torch.zeros(len(logits), dtype=torch.int64))
        (slope,) = torch.autograd.grad(values.sum(), logits)
    except (TypeError, ValueError):
        return ""
    figure, axes = plt.subplots(figsize=(6, 2.6), layout="constrained")
    axes.plot(logits.detach(), values.detach(), label="loss")
    axes.plot(logits.detach(), slope, "--", label="gradient")
    axes.set(xlabel="logit of the label", xlim=(-4, 8))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(folder / f"{name}.svg", transparent=True)
    plt.close(figure)
    return (
        f"```{{image}} {name}.svg\n:alt: {name} and its gradient against the label's logit\n```\n\n"
        "Loss and gradient of one sample with 10 classes and default options. The other logits run from 2 to -2.\n"
    )


def printed(*arguments: str) -> str:
    """Return what the command line prints."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        command_line([*arguments])
    return output.getvalue().replace(str(Path.home()), "~").strip()


def loss_page(name: str, folder: Path) -> str:
    builder = tr.get_loss_builder(name)
    table = printed("losses", name).rpartition("\n\n")[2]
    parts = [
        f"# {name}",
        f"```sh\ntimm train --loss {name}\n```",
        "## Definition",
        f"```{{eval-rst}}\n.. autoclass:: {builder.__module__}.{builder.__qualname__}\n   :no-members:\n```",
        loss_picture(name, folder),
        "## Options",
        f"```text\n{table}\n```",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def command_page() -> Iterator[str]:
    """Yield the parts of the page that shows the help text of each command."""
    yield "# Command line\n\n`topk-registry COMMAND ...`; `timm` is the same program.\n"
    for name in [info.name for info in commands.infos("topk-registry:*")]:
        text = printed(name, "--help-all" if name == "train" else "--help")
        yield f"\n## {name}\n\n```text\n{text}\n```\n"


def api_page() -> Iterator[str]:
    """Yield the parts of the page that documents the public names of the package and of its namespaces."""
    yield "# Public names\n"
    values = {name: getattr(tr, name) for name in dir(tr) if name != "__version__"}
    public = [name for name, value in values.items() if not inspect.ismodule(value)]
    yield from documented("topk_registry", public)
    for module in (*filter(inspect.ismodule, values.values()), topk_export):
        summary = (inspect.getdoc(module) or "").partition("\n")[0]
        yield f"\n## {module.__name__}\n\n{summary}\n"
        names = getattr(module, "__all__", [one for one in vars(module) if not one.startswith("_")])
        yield from documented(module.__name__, [one for one in names if one not in public])


def documented(module: str, names: list[str]) -> Iterator[str]:
    yield "\n```{eval-rst}\n"
    namespace = __import__(module, fromlist=names)
    for name in names:
        value = getattr(namespace, name)
        kind = "autoclass" if inspect.isclass(value) else "autofunction" if callable(value) else "py:data"
        members = kind == "autoclass" and not issubclass(value, BaseException)
        yield f".. {kind}:: {module}.{name}\n" + ("   :members:\n\n" if members else "\n")
    yield "```\n"


def write_pages(app: Sphinx) -> None:
    """Write the pages below ``docs/generated``, except unchanged pages, because Sphinx would build them again."""
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "topk"
    folder = DOCS / "generated"
    (folder / "losses").mkdir(parents=True, exist_ok=True)
    names = [name for name in tr.list_losses() if tr.loss_info(name).distribution == "topk-registry"]
    pages = {f"losses/{name}.md": loss_page(name, folder / "losses") for name in names}
    pages |= {"commands.md": "".join(command_page()), "api.md": "".join(api_page())}
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def rewrite_links(app: Sphinx, page: str, content: list[str]) -> None:
    """Replace links to files outside of docs/ by the link text. Link each name in the list of losses to its page."""
    folder = (DOCS / page).parent

    def shown(found: re.Match[str]) -> str:
        text, target = found.groups()
        path = (folder / target.partition("#")[0]).resolve()
        return found[0] if "://" in target or path.is_relative_to(DOCS) else text

    content[0] = re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", shown, content[0])
    if page == "reference/losses":
        content[0] = re.sub(r"(?m)^\| `(\w+)` \|", r"| [`\1`](../generated/losses/\1.md) |", content[0])
        content[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n../generated/losses/*\n```\n"


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", write_pages)
    app.connect("source-read", rewrite_links)
    return {"parallel_read_safe": True}
