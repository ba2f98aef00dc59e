"""A report as text: the lines of a terminal, and a page with plots and pictures."""

from collections.abc import Callable

import numpy as np

from topk_registry.analysis.comparison_page import Show, no_picture
from topk_registry.analysis.model_report import ClassRow, Report
from topk_registry.pages import Picture, gallery, heading, lines, listing, page, paragraph, table

SHOWN = 30
POINTS = 200
NAMES = {
    "log_likelihood": "log-likelihood (nats)",
    "brier": "Brier score",
    "calibration_error": "calibration error (bins of equal mass)",
    "smooth_calibration_error": "smooth calibration error",
    "area_under_risk": "area under risk against coverage",
}


def summary_rows(report: Report) -> list[tuple[str, str]]:
    """The measures over all images, accuracies in percent."""
    rows = []
    for name, value in report.summary.items():
        accuracy = "top" in name and name not in NAMES
        told = name.replace("macro_top", "macro top-").replace("top", "top-", 1) if accuracy else NAMES[name]
        rows.append((told.replace("top--", "top-"), f"{100 * value:.2f} %" if accuracy else f"{value:.4f}"))
    return rows


def worst_classes(report: Report, most: int = SHOWN) -> list[ClassRow]:
    """The classes with images of the lowest recall."""
    present = [row for row in report.classes if row.support]
    return sorted(present, key=lambda row: (row.recall or 0.0, row.precision or 0.0))[:most]


def class_columns(report: Report) -> tuple[str, ...]:
    """The columns of :func:`class_cells`."""
    return ("class", "images", "precision", "recall", *(f"top-{k} recall" for k in report.risk if k > 1), "Brier")


def class_cells(report: Report, row: ClassRow) -> tuple[str, ...]:
    """A class as cells of text."""
    further = (_percent(value) for k, value in row.topk_recall.items() if k > 1)
    return (row.name, str(row.support), _percent(row.precision), _percent(row.recall), *further, f"{row.brier:.4f}")


def pair_rows(report: Report, most: int = SHOWN) -> list[tuple[str, str, str, str, str]]:
    """The most confused pairs of classes as cells of text."""
    names = report.class_names
    return [
        (names[p.a], names[p.b], str(p.a_as_b), str(p.b_as_a), f"{100 * p.share:.1f} %") for p in report.pairs[:most]
    ]


PAIR_COLUMNS = ("class", "and class", "first as second", "second as first", "of their images")


def advice_of(report: Report) -> str:
    """What look-alikes suggest, in a sentence or two."""
    if not report.groups:
        return "No classes are taken for each other often enough to be look-alikes."
    count, classes = len(report.groups), sum(map(len, report.groups))
    return (
        f"{count} {'group' if count == 1 else 'groups'} of look-alikes hold {classes} of {len(report.class_names)} "
        f"classes; half of the images in groups have a group of {report.suggested_k} classes or fewer. A top-k loss "
        f"with k = {report.suggested_k} does not ask to tell those apart."
    )


def report_page(found: Report, show: Show = no_picture, where: Callable[[int], str] = str) -> str:
    """The text of the page.

    Args:
        found: the report.
        show: the thumbnail of an image, by its number.
        where: the file of an image, by its number.
    """
    lead = f"{found.name}, on {found.images} images of {len(found.class_names)} classes."
    sections = [
        ("Summary", table(("measure", "value"), summary_rows(found))),
        ("Classes", _classes(found)),
        ("Classes that are taken for each other", _confusions(found)),
        ("Reliability", _reliability(found)),
        ("Risk against coverage", _risk(found)),
        ("Images with the least probable labels", _worst(found, show, where)),
    ]
    return page("Report on a model", lead, sections)


def _classes(report: Report) -> str:
    rows = [class_cells(report, row) for row in worst_classes(report)]
    absent = sum(not row.support for row in report.classes)
    told = f"The {len(rows)} classes of the lowest recall, of {len(report.classes)}."
    told += f" {absent} classes have no image." if absent else ""
    recalls = sorted(row.recall or 0.0 for row in report.classes if row.support)
    plot = lines({"recall": list(enumerate(recalls))}, label="Recall of each class", of="classes, by rising recall")
    return plot + paragraph(told) + table(class_columns(report), rows)


def _confusions(report: Report) -> str:
    names = report.class_names
    groups = [", ".join(names[c] for c in group) for group in report.groups[:SHOWN]]
    more = len(report.groups) - len(groups)
    content = table(PAIR_COLUMNS, pair_rows(report)) if report.pairs else paragraph("No image has another best class.")
    content += heading("Look-alikes") + paragraph(advice_of(report)) + (listing(groups) if groups else "")
    return content + (paragraph(f"{more} further groups.") if more else "")


def _reliability(report: Report) -> str:
    body = ""
    for k, diagram in report.reliability.items():
        event = "the best class is the label" if k == 1 else f"the label is among the {k} best classes"
        body += heading(f"Softmax, top-{k}") + _diagram(
            list(zip(diagram.predicted.tolist(), diagram.observed.tolist(), strict=True)),
            f"Share of images where {event}, against its probability",
        )
        body += paragraph(
            f"Calibration error {diagram.calibration_error:.4f}, smooth calibration error "
            f"{diagram.smooth_calibration_error:.4f}. Bins hold as many images each."
        )
    for k, marginals in report.marginals.items():
        if k > 1:
            body += heading(f"Marginals, k = {k}") + _diagram(
                list(zip(marginals.predicted, marginals.observed, strict=True)),
                "Observed against predicted marginals",
            )
            body += paragraph(
                f"Calibration error {marginals.calibration_error:.4f}. The label counts as one of {k} answers, so that "
                f"images with a single certain answer lie above the diagonal."
            )
    return body


def _diagram(points: list[tuple[float, float]], label: str) -> str:
    return lines({"observed": points, "if honest": [(0.0, 0.0), (1.0, 1.0)]}, label=label, of="predicted probability")


def _risk(report: Report) -> str:
    step = {k: max(1, len(curve.risk) // POINTS) for k, curve in report.risk.items()}
    named = {
        f"top-{k}": list(zip(curve.coverage[:: step[k]].tolist(), curve.risk[:: step[k]].tolist(), strict=True))
        for k, curve in report.risk.items()
    }
    plot = lines(named, label="Share of wrong images among those kept", of="share of images kept, most certain first")
    kept = [
        (f"{risk:.0%}", *(_percent(c.at_risk(risk)) for c in report.risk.values())) for risk in (0.01, 0.05, 0.1, 0.2)
    ]
    return plot + table(("at most wrong", *(f"kept, top-{k}" for k in report.risk)), kept)


def _worst(report: Report, show: Show, where: Callable[[int], str]) -> str:
    names = report.class_names
    pictures = []
    for i in report.worst.tolist():
        label, best = names[report.labels[i]], names[report.predicted[i]]
        chance = np.exp(report.likelihoods[i])
        sure = report.confidence[i]
        told = f"{where(i)}: label {label} with probability {chance:.2g}, best class {best} with {sure:.2g}"
        pictures.append(Picture(show(i), f"{label}: {best} {sure:.2f}", told))
    return gallery(pictures)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
