"""Write the differences that the studies measured into pages, from the results.

``python -m topk_studies.report.quotes docs/results README.md docs/guide/choose.md``

A page may hold the table of differences between ``<!-- measured -->`` and ``<!-- /measured -->``, those of study tau
between ``<!-- tau -->`` and ``<!-- /tau -->`` and between ``<!-- default of tau -->`` and ``<!-- /default of tau -->``,
the accuracies by epoch between ``<!-- regime -->`` and ``<!-- /regime -->``, and a difference anywhere between
``<!-- ROW PAGE -->`` and ``<!-- / -->``, such as ``<!-- clean images -->+7.0 ± 2.1<!-- / -->``.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topk_studies.report import regime, tau

REGIME = "regime"  # the file of accuracies by epoch
PAGES = {"features": "on feature vectors", "images": "on images"}
OF_ONE = ("rare_classes", "several_labels", "small_sets")  # pages of one study, which may be quoted, too
BLOCK = re.compile(r"(?<=<!-- measured -->\n).*?(?=<!-- /measured -->)", re.DOTALL)
BY_TAU = re.compile(r"(?<=<!-- tau -->\n).*?(?=<!-- /tau -->)", re.DOTALL)
BY_EPOCH = re.compile(r"(?<=<!-- regime -->\n).*?(?=<!-- /regime -->)", re.DOTALL)
DEFAULT_TAU = re.compile(r"(?<=<!-- default of tau -->\n).*?(?=<!-- /default of tau -->)", re.DOTALL)
QUOTE = re.compile(r"(<!-- (\w+) (\w+) -->).*?(<!-- / -->)")
NUMBER = re.compile(r": (?P<mean>[+-][0-9.]+)(?: ± (?P<half>[0-9.]+))? (?:points|classes)")

SMALLEST = re.compile(r"no difference larger than ([0-9.]+)")
SAME = "no difference"

Results = Mapping[str, Sequence[Mapping[str, Any]]]  # by page, the studies with their notes


@dataclass(frozen=True)
class Row:
    """A difference of two settings on each page.

    Args:
        words: the difference, as the table names it.
        study: the study that measured it.
        compared: the beginnings of its notes' evidence.
        sign: -1 where the study subtracts the other way round.
        span: whether the smallest and the largest are told, and not each with its interval.
    """

    words: str
    study: str
    compared: tuple[str, ...]
    sign: int = 1
    span: bool = False


NOISES = ("0.4", "0.8", "1")
ROWS = {
    "clean": Row(
        "clean labels, top-5: `smooth_topk_svm` less cross-entropy",
        "noise",
        ("noise 0, top-5 of ce less smooth_topk_svm",),
        sign=-1,
    ),
    "noise": Row(
        "noisy labels, top-5: `smooth_topk_svm` less cross-entropy, the more the noisier",
        "noise",
        tuple(f"noise {noise}, top-5 of smooth_topk_svm less ce" for noise in NOISES),
        span=True,
    ),
    "noised": Row(
        "the same of `noised_topk`",
        "noise",
        tuple(f"noise {noise}, top-5 of noised_topk less ce" for noise in NOISES),
        span=True,
    ),
    "first": Row(
        "noise 0.4, in **top-1**: `smooth_topk_svm` less cross-entropy",
        "noise",
        ("noise 0.4, top-1 of smooth_topk_svm less ce",),
    ),
    "little": Row(
        "a quarter of the data, top-5: `smooth_topk_svm` less cross-entropy",
        "small-data",
        ("0.25 of the data, top-5 of smooth_topk_svm less ce",),
    ),
    "gap": Row(
        "required gap alpha = 1 less 0, top-5, without and with noise",
        "margin",
        ("noise 0, top-5 of alpha = 1 less alpha = 0", "noise 0.8, top-5 of alpha = 1 less alpha = 0"),
    ),
    "tail": Row(
        "a long tail, macro top-5: `noised_topk_imbalanced` less cross-entropy",
        "imbalance",
        ("macro top-5 of noised_topk_imbalanced less ce",),
    ),
    "bonus": Row(
        "bonus on cross-entropy, top-1: `encouraging` less cross-entropy",
        "encouraging",
        ("top-1 of encouraging log_end=0.75 less ce", "top-1 of encouraging log_end=1 less ce"),
    ),
    "taylor": Row(
        "100 classes, top-1: `log_taylor_softmax` less cross-entropy",
        "spherical",
        ("100 classes, top-1 of ce less log_taylor_softmax",),
        sign=-1,
    ),
}
OVER_NOISE = "{} network, mean over noise, top-5 of tau = 0.1 less tau = 1"
FURTHER = {  # quoted in sentences, and no part of the table
    "unsmoothed": Row("tau = 0.1 less 0", "temperature", ("top-5 of smooth_topk_svm tau=0.1 less tau=0",)),
    "hot": Row("tau = 0.1 less 10", "temperature", ("top-5 of smooth_topk_svm tau=0.1 less tau=10",)),
    "shallow": Row("tau = 0.1 less 1, the usual network", "tau", (OVER_NOISE.format("usual"),)),
    "deep": Row("tau = 0.1 less 1, the deep network", "tau", (OVER_NOISE.format("deep"),)),
    "rare": Row(
        "a long tail, the classes with few images, top-5: `noised_topk_imbalanced` less cross-entropy",
        "imbalance",
        ("few top-5 of noised_topk_imbalanced less ce",),
    ),
    "taylors": Row(
        "10 classes, top-1: `log_taylor_softmax` less cross-entropy",
        "spherical",
        ("10 classes, top-1 of log_taylor_softmax less ce",),
    ),
    "spherical": Row(
        "10 classes, top-1: `log_spherical_softmax` less cross-entropy",
        "spherical",
        ("10 classes, top-1 of log_spherical_softmax less ce",),
    ),
    "most": Row("100 classes", "spherical", ("100 classes, top-1 of ce less log_spherical_softmax",), sign=-1),
    "quiet": Row("epsilon = 1 less 0", "noise-parameter", ("top-5 of epsilon = 1 less epsilon = 0",)),
    "loud": Row("epsilon = 1 less 100", "noise-parameter", ("top-5 of epsilon = 1 less epsilon = 100",)),
    **{
        name: Row(
            f"wrong labels of four kinds, {metric}: `{loss}` less cross-entropy",
            "noise-kinds",
            (f"mean over confusions, annotators, uniform, family, {metric} of {loss} less ce",),
        )
        for name, loss, metric in (
            ("generalised", "generalised_cross_entropy", "top-1"),
            ("adaptive", "aldr_kl", "top-1"),
            ("lenient", "epsilon_softmax", "top-1"),
            ("five", "epsilon_softmax k=5", "top-5"),
            ("smooth", "smooth_topk_svm", "top-5"),
        )
    },
    "confused": Row(
        "labels confused as by a weaker model, top-5: `smooth_topk_svm` less cross-entropy",
        "noise-kinds",
        ("confusions, top-5 of smooth_topk_svm less ce",),
    ),
    "adjusted": Row(
        "a long tail, macro top-5: `logit_adjustment` less cross-entropy",
        "rare-classes",
        ("macro top-5 of logit_adjustment less cross-entropy",),
    ),
    "small": Row(
        "classes in a prediction set: cross-entropy less `conformal_training`",
        "small-sets",
        ("set size of ce less conformal_training",),
    ),
    "steady": Row(
        "classes in a prediction set: cross-entropy less `conformal_training_low_variance`",
        "small-sets",
        ("set size of ce less conformal_training_low_variance",),
    ),
    "leader": Row(
        "classes in a prediction set: `smooth_topk_svm` less `conformal_training`",
        "small-sets",
        ("set size of smooth_topk_svm less conformal_training",),
    ),
    "draws": Row("50 draws less 5", "noise-parameter", ("top-5 of B = 50 less B = 5",)),
}


def read(folder: Path) -> Results:
    """The results of every page, as the repository keeps them."""
    files = dict.fromkeys((*PAGES, *OF_ONE, *tau.WORDS, REGIME))
    return {file: json.loads((folder / f"{file}.json").read_text(encoding="utf-8")) for file in files}


def cell(row: Row, studies: Sequence[Mapping[str, Any]]) -> str:
    """A difference on one page, with its verdict where that is not that one is ahead."""
    notes = [_note(studies, row.study, words) for words in row.compared]
    differences = [(_verdict(note), *_number(note, row.sign)) for note in notes]
    if row.span and all(verdict in ("agrees", "differs") for verdict, _, _ in differences):
        means = sorted(mean for _, mean, _ in differences)
        return f"{means[0]:+.1f} to {means[-1]:+.1f}"
    each = dict.fromkeys(_told(*one) for one in differences)
    return ", ".join(each)


def table(results: Results) -> str:
    """Every difference on every page."""
    head = ["| |" + "".join(f" {words} |" for words in PAGES.values()), "|---" * (1 + len(PAGES)) + "|"]
    rows = (f"| {row.words} |" + "".join(f" {cell(row, results[page])} |" for page in PAGES) for row in ROWS.values())
    return "\n".join([*head, *rows, ""])


def update(text: str, results: Results) -> str:
    """A page with its numbers written anew."""
    cells = {**ROWS, **FURTHER}
    text = QUOTE.sub(lambda quote: f"{quote[1]}{cell(cells[quote[2]], results[quote[3]])}{quote[4]}", text)
    text = BY_TAU.sub(lambda _: tau.table(tau.conditions(results)), text)
    text = BY_EPOCH.sub(lambda _: regime.table(results[REGIME]), text)
    text = DEFAULT_TAU.sub(lambda _: tau.summary(tau.conditions(results)), text)
    return BLOCK.sub(lambda _: table(results), text)


def studied(results: Results) -> set[str]:
    """The losses that a claim of the studies compares."""
    compared = (note["evidence"] for page in (*PAGES, *OF_ONE) for study in results[page] for note in study["notes"])
    return {word for evidence in compared for word in re.findall(r"[a-z_]+", evidence)}


def _note(studies: Sequence[Mapping[str, Any]], study: str, compared: str) -> Mapping[str, Any]:
    notes = next(each["notes"] for each in studies if each["study"] == study)
    return next(note for note in notes if note["evidence"].startswith(f"{compared}: "))


def _number(note: Mapping[str, Any], sign: int) -> tuple[float, str]:
    match = NUMBER.search(note["evidence"])
    assert match is not None, note["evidence"]
    return sign * float(match["mean"]), f"{float(match['half']):.1f}"


def _verdict(note: Mapping[str, Any]) -> str:
    """The verdict; where no difference matters, with the smallest one that would."""
    smallest = SMALLEST.search(note["evidence"])
    return f"{SAME} above {smallest[1] if smallest else 1}" if note["verdict"] == "same" else note["verdict"]


def _told(verdict: str, mean: float, half: str) -> str:
    if verdict.startswith(SAME):
        return verdict
    return f"{'' if verdict in ('agrees', 'differs') else f'{verdict}: '}{mean:+.1f} ± {half}"


def main(argv: Sequence[str]) -> int:
    if len(argv) < 2:
        print("usage: python -m topk_studies.report.quotes RESULTS PAGE.md ...", file=sys.stderr)
        return 2
    results, *pages = map(Path, argv)
    for page in pages:
        page.write_text(update(page.read_text(encoding="utf-8"), read(results)), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
