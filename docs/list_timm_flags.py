"""List the flags of timm's train.py that ``timm train`` lacks: ``python docs/list_timm_flags.py``.

The table is in docs/guide/train.md. docs/timm_flags.json holds the names of timm's flags, as its package has no
train.py. With ``--script PATH`` they are read anew from a copy of that.
"""

import argparse
import ast
import json
import re
from pathlib import Path

from timm import __version__

from topk_registry.train.config.arguments import create_parser
from topk_registry.train.config.timm_names import ELSEWHERE

DOCS = Path(__file__).parent
FLAGS = DOCS / "timm_flags.json"
PAGE = DOCS / "guide" / "train.md"
TABLE = re.compile(r"(?<=<!-- timm's flags -->\n).*?(?=<!-- /timm's flags -->)", re.DOTALL)

# what the flags of a group, by the start of their names, are for, and why they are not here
REASONS = {
    (
        "naflex-",
    ): "sequences of patches, of several lengths and sizes: our batches have one shape. `timm validate` reads "
    "models of this kind",
    ("train-img-sizes", "train-batch-sizes", "train-size-", "variable-batch-"): "batches of several image sizes: ours "
    "have one shape, so that a run that goes on finds its place in the epoch",
    (
        "kd-",
        "distill-loss-weight",
        "task-loss-weight",
    ): "distillation from a teacher: it trains on a sum of two losses, "
    "and only one of them would be the registered one",
    ("torchscript", "fuser"): "TorchScript, which PyTorch no longer develops: `--torchcompile` takes its place",
    ("model-ema-force-fp32",): "the moving average has the precision of the weights; in bfloat16 it is rounded at "
    "random, as timm does by default, so that small steps are not lost",
}


def flags_of(script: Path) -> list[str]:
    """The long flags that a training script adds to its parser, without their dashes, in order."""
    found: dict[str, None] = {}
    calls = (node for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))) if isinstance(node, ast.Call))
    for call in sorted(calls, key=lambda node: node.lineno):
        if getattr(call.func, "attr", "") == "add_argument":
            names = [str(arg.value) for arg in call.args if isinstance(arg, ast.Constant)]
            found |= {name[2:]: None for name in names if name.startswith("--")}
    return list(found)


def known() -> list[str]:
    """The names of timm's flags."""
    return json.loads(FLAGS.read_text(encoding="utf-8"))["flags"]


def ours() -> set[str]:
    """The names of the flags that ``timm train`` takes and follows."""
    taken = {name[2:] for action in create_parser()._actions for name in action.option_strings if name[:2] == "--"}
    return taken - {name.replace("_", "-") for name in ELSEWHERE}


def lacking() -> list[str]:
    """The names of timm's flags that are not ours."""
    return [name for name in known() if name not in ours()]


def group_of(name: str) -> tuple[str, ...]:
    """The group of a flag that is not ours.

    Raises:
        KeyError: no reason is given for it.
    """
    found = next((group for group in REASONS if name.startswith(group)), None)
    if found is None:
        raise KeyError(f"--{name} is timm's and not ours: give a reason in REASONS")
    return found


def table() -> str:
    """The table in Markdown, one row for each reason."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in lacking():
        rows.setdefault(group_of(name), []).append(f"`--{name}`")
    lines = ["| flags of timm's | what they are for, and why not here |", "|---|---|"]
    lines += [f"| {', '.join(names)} | {REASONS[group]} |" for group, names in rows.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--script", type=Path, help="a copy of timm's train.py to read the flags from")
    script = parser.parse_args().script
    if script is not None:
        content = {"timm": __version__, "flags": flags_of(script)}
        FLAGS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLE.sub(lambda _: table(), page), encoding="utf-8")


if __name__ == "__main__":
    main()
