"""The page of ``topk-registry labels``: suspicious labels and duplicates with their pictures."""

from collections.abc import Sequence

from topk_registry.analysis.duplicates import DuplicateGroup
from topk_registry.evaluation.label_findings import LabelFindings
from topk_registry.evaluation.output import thumbnails
from topk_registry.pages import Picture, gallery, heading, page, paragraph, table

MOST_SWAPS = 20
MOST_GROUPS = 20
MOST_OF_A_GROUP = 8


def label_page(findings: LabelFindings, most: int) -> str:
    """The text of the page, with ``most`` pictures of suspicious labels."""
    k, suspicious = findings.issues.k, findings.found
    kinds = "the best class" if k == 1 else f"among the {k} best classes"
    sections = [
        ("Summary", table(("", ""), findings.summary())),
        (
            "Labels that are probably wrong",
            paragraph(
                f"Ordered by the log-odds of the label being {kinds}, the least likely first. Above the label and the "
                "suggested class. The model may be wrong, too: a person decides."
            )
            + (_pictures(findings, suspicious[:most]) or paragraph("None.")),
        ),
    ]
    if swaps := findings.swaps():
        sections.append(("Label and suggested class", table(("label", "suggested", "images"), swaps[:MOST_SWAPS])))
    if groups := findings.groups:
        shown = groups[:MOST_GROUPS]
        body = "".join(_group(findings, group) for group in shown)
        more = f" The first {len(shown)} of {len(groups)} groups." if len(groups) > len(shown) else ""
        sections.append(
            ("Pictures that are there twice", paragraph(f"Groups with differing labels come first.{more}") + body)
        )
    return page("Labels to look at", f"{findings.predictions.name} on {findings.predictions.images.name}", sections)


def _pictures(findings: LabelFindings, images: Sequence[int]) -> str:
    return gallery(
        [
            _picture(
                findings,
                image,
                f"{findings.label(image)} → {findings.suggested(image)}, {findings.issues.log_odds[image]:.1f}",
            )
            for image in images
        ]
    )


def _group(findings: LabelFindings, group: DuplicateGroup) -> str:
    kind = "the same pixels" if group.exact else "nearly the same"
    title = f"{len(group.members)} images, {kind}{', differing labels' * group.labels_differ}"
    return heading(title) + gallery([_picture(findings, i, findings.label(i)) for i in group.members[:MOST_OF_A_GROUP]])


def _picture(findings: LabelFindings, image: int, caption: str) -> Picture:
    show = thumbnails(findings.predictions.images)
    return Picture(show(image), caption, f"{findings.names[image]}: {caption}")
