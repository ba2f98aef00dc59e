"""Run exported files in every runtime that is installed, and write a table of what came of it.

    python -m tests.export.runtimes [--output docs/results/runtimes.md] [NAME ...]

Install what is to be tried: ``pip install openvino tract MNN onnx2torch``, ``npm install onnxruntime-node
onnxruntime-web`` (``NODE_MODULES`` names the folder, where it is not that of the checkout), and a Chromium with its
driver. A runtime that is missing has a row with the reason.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import timm
import torch

from tests.export.conftest import NORMAL
from tests.export.runtimes.runtimes import RUNTIMES, MissingError, Run
from topk_export import export_onnx
from topk_export.conversion.convert import plain
from topk_export.verification import graph, reference

HEADS = ((1000, 5), (12, 3))
MODELS = ("test_resnet", "test_vit")
LIMIT = 1e-4
TEXT = """# Runtimes

`python -m tests.export.runtimes` writes this table: the same exported files in every runtime that is installed. Heads
alone are held against the definition in float64, on rows of random scores, one class far ahead, a shift of 1000 and
all equal: the largest relative error of a marginal. Models have random weights: the largest error of the logits
against onnxruntime's, over the largest logit, and that of the marginals against the definition on the runtime's own
logits. The indices must be classes of the largest scores.

"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.export.runtimes", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(RUNTIMES)} (default: all)")
    parser.add_argument("--output", type=Path, help="write the table there too")
    args = parser.parse_args(argv)
    if unknown := set(args.names) - set(RUNTIMES):
        parser.error(f"no runtime {', '.join(sorted(unknown))}; there are {', '.join(RUNTIMES)}")
    titles = [*(f"head, n = {n}, k = {k}" for n, k in HEADS), *MODELS]
    rows = [f"| runtime | version | {' | '.join(titles)} |", "|" + "---|" * (len(titles) + 2)]
    with tempfile.TemporaryDirectory() as folder:
        cases = [*heads(Path(folder)), *models(Path(folder))]
        for name in args.names or RUNTIMES:
            try:
                with RUNTIMES[name]() as (version, run):
                    cells = [version, *(cell(run, *case) for case in cases)]
            except MissingError as reason:
                cells = [f"not tried: {reason}", *("" for _ in cases)]
            rows.append(f"| {name} | {' | '.join(cells)} |")
            print(rows[-1], flush=True)
    if args.output:
        args.output.write_text(TEXT + "\n".join(rows) + "\n", encoding="utf-8")
    return 0


def heads(folder: Path) -> list[tuple[Path, np.ndarray, int]]:
    """Return files of heads alone, with scores for them."""
    cases = []
    for n, k in HEADS:
        torch.manual_seed(0)
        tiny = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, n))
        config = {"input_size": (3, 2, 2), "crop_pct": 1.0, **NORMAL}
        path = export_onnx(tiny, folder / f"head_{n}.onnx", k=k, data_config=config)
        onnx.save(graph.head_model(onnx.load(str(path))), str(path))
        cases.append((path, scores(n), k))
    return cases


def scores(n: int) -> np.ndarray:
    """Rows of scores [5, n]: random, shifted, one class far ahead, a few values only, all equal."""
    rng = np.random.default_rng(0)
    rows = rng.normal(0, 3, (5, n))
    rows[1] += 1000
    rows[2, n // 3] = 60
    rows[3] = rng.integers(0, 4, n)
    rows[4] = 0
    return rows.astype(np.float32)


def models(folder: Path) -> list[tuple[Path, np.ndarray, int]]:
    """Return files of whole models, with images for them."""
    cases = []
    for name in MODELS:
        torch.manual_seed(0)
        path = folder / f"{name}.onnx"
        export_onnx(timm.create_model(name, num_classes=100), path, k=5)
        with np.load(path.with_suffix(".sample.npz")) as sample:
            cases.append((path, sample["input"], 5))
    return cases


def cell(run: Run, path: Path, x: np.ndarray, k: int) -> str:
    """Return the figures of one file in one runtime, or the first line of its error."""
    try:
        found = run(path, x)
        own = found.get("logits", x)
        error = np.max(np.abs(found["marginals"] - (truth := reference.marginals(own, k))) / truth)
        wrong = [] if error <= LIMIT else ["marginals are wrong"]
        figures = [f"{error:.1e}"]
        if "logits" in found:
            with RUNTIMES["onnxruntime"]() as (_, peer):
                expected = peer(path, x)["logits"]
            figures.insert(0, f"{np.max(np.abs(own - expected)) / np.max(np.abs(expected)):.1e}")
        if not same_sets(own, found["indices"]):
            wrong.append("indices are wrong")
    except Exception as error:  # runtimes raise what they like
        return f"fails: {plain(error)}".replace("|", "/")[:200]
    return ", ".join([*figures, *wrong])


def same_sets(logits: np.ndarray, indices: np.ndarray) -> bool:
    """Whether the scores at ``indices`` are the largest ones, whichever of equal scores was taken."""
    best = -np.sort(-logits, axis=-1)[:, : indices.shape[1]]
    return bool((np.take_along_axis(logits, indices.astype(np.int64), -1) == best).all())


if __name__ == "__main__":
    raise SystemExit(main())
