"""Draw a row of icons with the answers of the best model of the study ``icons``.

    python -m topk_studies.draw package docs/results/icons.json docs/pictures/icons.svg

The first argument is the folder of the data. The model is the row with the highest top-k accuracy under the second
condition, trained with seed 0. The icons are random test pictures from sets whose license needs no credit beyond the
license text; the picture names the sets and their licenses.
"""

import base64
import io
import json
import sys
from html import escape
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from PIL import Image

from topk_studies.data.icons import Icons
from topk_studies.data.photographs import open_pictures
from topk_studies.features import features_of
from topk_studies.heads import Trained
from topk_studies.tables import by_condition, title

COUNT, WIDTH, SIZE, LINE = 7, 124, 64, 18
LICENSES = ("MIT", "ISC", "Apache-2.0", "CC0-1.0", "Unlicense")


def image(pixels: np.ndarray, x: int) -> str:
    """Return the SVG element of a picture [height, width, 3] whose left edge is at x."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    return f'<image x="{x}" y="8" width="{SIZE}" height="{SIZE}" href="data:image/png;base64,{data}"/>'


def row(pixels: np.ndarray, truth: list[str], answers: list[list[str]], lines: list[str]) -> str:
    """Return an SVG file.

    Args:
        pixels: pictures [N, height, width, 3].
        truth: the true class of each picture, above its answers.
        answers: classes of each picture, the most probable first. The true class is bold.
        lines: text below the pictures.
    """
    found = []
    for i, (picture, name, given) in enumerate(zip(pixels, truth, answers, strict=True)):
        found.append(image(picture, i * WIDTH + 8))
        found.append(f'<text x="{i * WIDTH + 8}" y="{SIZE + 26}" class="truth">{escape(name)}</text>')
        for j, answer in enumerate(given):
            kind = ' class="right"' if answer == name else ""
            place = f'x="{i * WIDTH + 8}" y="{SIZE + 48 + j * LINE}"'
            found.append(f"<text {place}{kind}>{j + 1}. {escape(answer)}</text>")
    top = SIZE + 62 + len(answers[0]) * LINE
    found += [f'<text x="8" y="{top + j * LINE}" fill="#555">{escape(line)}</text>' for j, line in enumerate(lines)]
    size = f'width="{len(truth) * WIDTH}" height="{top + len(lines) * LINE}"'
    style = "<style>text{font:13px sans-serif}.truth{fill:#06c}.right{font-weight:bold}</style>"
    ground = '<rect width="100%" height="100%" fill="#fff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{style}{ground}\n' + "\n".join(found) + "\n</svg>\n"


def main(folder: Path, results: Path, output: Path) -> None:
    document = json.loads(results.read_text())
    condition, cell = list(by_condition(document).items())[-1]
    seeds = min(each["seeds"] for each in document["rows"])
    best = max(cell.values(), key=lambda each: fmean(each["topk"][:seeds]))
    pictures, classes = open_pictures("icons", folder)
    trained = Trained(features_of("icons", pictures), len(classes), document["k"])
    run = {
        **{key: best[key] for key in ("loss", "loss_opt", "lr")},
        **best["shared"],
        "condition": condition,
        "seed": 0,
    }
    scores, _ = trained.scores(run, "test")

    whole, about = Icons("test", root=folder), json.loads((folder / "collections.json").read_text())
    owner = {picture.tobytes(): name for picture, name in zip(whole.images, whole.sets, strict=True)}
    test = pictures["test"]
    sets = [owner[picture.tobytes()] for picture in test.images]
    free = [i for i, name in enumerate(sets) if about[name]["license"].get("spdx") in LICENSES]
    chosen = np.random.default_rng(0).choice(free, COUNT, replace=False)
    answers = [[classes[c] for c in torch.topk(scores[i], document["k"]).indices.tolist()] for i in chosen]
    used = sorted({sets[i] for i in chosen})
    credits = [
        f"{about[name]['name']}, {about[name]['author']['name']} ({about[name]['license']['spdx']})" for name in used
    ]
    lines = [f"Answers of {title(best['row'], document['k']).replace('`', '')}; {condition} in the training labels."]
    lines += [("Icon sets: " if j == 0 else "") + "; ".join(credits[j : j + 3]) for j in range(0, len(credits), 3)]
    truth = [classes[test.labels["clean"][i]] for i in chosen]
    output.write_text(row(test.images[chosen], truth, answers, lines), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
