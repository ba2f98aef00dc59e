"""What ``topk-registry labels`` finds, as rows of a CSV file, as JSON and as lines of a terminal."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from topk_registry.analysis.duplicates import DuplicateGroup
from topk_registry.analysis.labels import LabelIssues
from topk_registry.evaluation.duplicates import Duplicates
from topk_registry.evaluation.output import text_table
from topk_registry.evaluation.predictions import Predictions
from topk_registry.folders.images import count_of, listed

MOST_SWAPS = 5


@dataclass(frozen=True)
class LabelFindings:
    """Suspicious labels and duplicates of one set of images.

    Args:
        predictions: the scores that labels were compared with.
        issues: what the scores say of each label.
        duplicates: None where pictures were not looked at.
        names: of the images, as ``timm train --exclude`` takes them.
        words: the names of the classes in that file.
        about: settings of the search, by name.
    """

    predictions: Predictions
    issues: LabelIssues
    duplicates: Duplicates | None
    names: Sequence[str]
    words: Sequence[str]
    about: Mapping[str, Any]

    @property
    def groups(self) -> list[DuplicateGroup]:
        return self.duplicates.groups if self.duplicates else []

    @property
    def found(self) -> list[int]:
        """The images with suspicious labels, worst first; what cannot be read is not judged."""
        skipped = set(self.duplicates.unreadable) if self.duplicates else set()
        return [i for i in self.issues.found.tolist() if i not in skipped]

    def label(self, image: int) -> str:
        return self.words[int(self.predictions.labels[image])]

    def suggested(self, image: int) -> str:
        return self.words[int(self.issues.suggested[image])]

    def row(self, image: int) -> dict[str, Any]:
        """An image with its label, the suggested one, and how sure the scores are."""
        return {
            "image": self.names[image],
            "label": self.label(image),
            "suggested": self.suggested(image),
            "log_odds": round(float(self.issues.log_odds[image]), 4),
            "label_place": int(self.issues.rank[image]),
        }

    def rows(self, fill: str = "") -> list[dict[str, Any]]:
        """The rows of the CSV file: suspicious labels, then duplicates whose labels differ.

        Args:
            fill: the action of suspicious labels.
        """
        other: dict[int, str] = {}
        for group in self.groups:
            if group.labels_differ:
                for image in group.members:
                    other[image] = " | ".join(self.names[i] for i in group.members if i != image)
        suspicious = dict.fromkeys(self.found)
        rest = [i for i in other if i not in suspicious]
        ranked = [
            {**self.row(image), "rank": place, "duplicates": other.get(image, ""), "action": fill}
            for place, image in enumerate(suspicious, 1)
        ]
        copies = [{**self.row(image), "rank": "", "duplicates": other[image], "action": ""} for image in rest]
        return [*ranked, *copies]

    def swaps(self) -> list[tuple[str, str, int]]:
        """Pairs of label and suggested class with the number of suspicious labels, the most frequent first."""
        counts = Counter((self.label(image), self.suggested(image)) for image in self.found)
        return [(label, suggested, count) for (label, suggested), count in counts.most_common()]

    def facts(self) -> dict[str, Any]:
        """All findings as plain types."""
        duplicates = None
        if self.duplicates is not None:
            duplicates = {
                "groups": [
                    {
                        "images": [self.names[i] for i in group.members],
                        "labels": [self.label(i) for i in group.members],
                        "same_pixels": group.exact,
                        "labels_differ": group.labels_differ,
                    }
                    for group in self.groups
                ],
                "unreadable": [self.names[i] for i in self.duplicates.unreadable],
            }
        return {
            **self.about,
            "images": len(self.names),
            "classes": len(self.predictions.class_names),
            "suspicious": len(self.found),
            "labels": [self.row(image) for image in self.found],
            "swaps": [
                {"label": label, "suggested": suggested, "images": count} for label, suggested, count in self.swaps()
            ],
            "duplicates": duplicates,
        }

    def summary(self) -> list[tuple[str, str]]:
        """Names and sentences, for the terminal and the page."""
        k, share = self.issues.k, len(self.found) / max(1, len(self.names))
        best = "not the best class" if k == 1 else f"not among the {k} best classes"
        lines = [
            ("images", f"{len(self.names)} of {self.predictions.images.name}, {self.about['scores']}"),
            ("suspicious", f"{count_of(self.found, 'label')} ({share:.1%}): {best}, and another class is confident"),
        ]
        pairs = [f"{label} -> {suggested} {count}" for label, suggested, count in self.swaps() if count > 1]
        if pairs:
            lines.append(("most often", listed(pairs, MOST_SWAPS)))
        if self.duplicates is not None:
            differ = sum(group.labels_differ for group in self.groups)
            same = sum(group.exact for group in self.groups)
            told = f"{count_of(self.groups, 'group')}, {same} of the same pixels, {differ} with differing labels"
            lines.append(("duplicates", told if self.groups else "none"))
            if self.duplicates.unreadable:
                lines.append(("unreadable", listed([self.names[i] for i in self.duplicates.unreadable])))
        return lines

    def lines(self, most: int) -> list[str]:
        """The summary and the first suspicious labels as lines of a terminal."""
        shown = [f"{name:<12}{text}" for name, text in self.summary()]
        rows = [self.row(image) for image in self.found[:most]]
        if rows:
            cells = [
                (str(i), row["image"], row["label"], row["suggested"], f"{row['log_odds']:.2f}")
                for i, row in enumerate(rows, 1)
            ]
            shown += ["", text_table(("", "image", "label", "suggested", "log-odds"), cells)]
        differing = [group for group in self.groups if group.labels_differ][:most]
        if differing:
            shown += ["", "the same picture under differing labels:"]
            shown += [
                "  " + ", ".join(f"{self.names[i]} ({self.label(i)})" for i in group.members) for group in differing
            ]
        return shown
