"""The metadata of an exported file: JSON values under plain keys in the ONNX model's ``metadata_props``.

The file alone is enough to predict with: class names, k and temperature, and how an image becomes its input. Readers
accept their own schema version and older ones; a newer one is an error, because its keys may mean something else.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from topk_export.errors import ModelFileError
from topk_export.runtime.preprocess import Preprocess

SCHEMA = "topk_registry.classifier"
VERSION = 1

SEMANTICS = {
    "logits": "scores [batch, num_classes], float32, as the backbone gives them (not divided by the temperature)",
    "marginals": "the chance that each class is in the top-k set [batch, num_classes], float32; they sum to k, and are "
    "not a softmax",
    "indices": "the k classes of the largest scores [batch, k], int64, best first",
}
GROUP = "group"  # the input with the number of each image's group, in a file with thresholds by group
NO_GROUP = -1  # the number of a group that is not told: the largest threshold of all serves
MULTILABEL = "multilabel"  # the task of a file that gives several labels an image
PROBABILITY_SEMANTICS = {
    "logits": SEMANTICS["logits"],
    "probabilities": "the chance that each class is among the labels of the image [batch, num_classes], float32: the "
    "sigmoid of logits / temperature, class by class; they have no common sum",
}
SET_SEMANTICS = {
    "set": "which classes are in the prediction set [batch, num_classes], bool; see sets for what it promises",
    "set_size": "how many they are [batch], int64",
}
NODE_SEMANTICS = {
    "set_nodes": "the nodes of the tree that the prediction set is made of [batch, nodes], int64, as numbers into "
    "sets.tree.names; -1 where there are fewer",
}
LABEL_SEMANTICS = {
    "labels": "which classes are chosen [batch, num_classes], bool: those whose probability reaches the threshold of "
    "the class; see labels for how it was found",
    "set": "which classes are in the set of labels [batch, num_classes], bool: those whose probability reaches one "
    "threshold for all; see sets for what it promises",
    "set_size": SET_SEMANTICS["set_size"],
}


@dataclass(frozen=True)
class Metadata:
    """Everything a reader of the file needs; ``preprocess`` is stored flat, key by key."""

    k: int
    temperature: float
    num_classes: int
    class_names: tuple[str, ...]
    preprocess: Preprocess
    in_graph: bool = False  # the graph takes uint8 [batch, height, width, channels] and normalises it
    outputs: Mapping[str, str] = field(default_factory=lambda: dict(SEMANTICS))
    task: str = "image-classification"
    backbone: str = ""
    opset: int = 18
    dtype: str = "fp32"
    torch: str = ""
    timm: str = ""
    checkpoint_sha256: str | None = None
    licence: str | None = None
    loss: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    weights_sha256: str | None = None  # of the file beside the model that holds its weights
    sets: Mapping[str, Any] | None = None  # what `topk-registry calibrate` wrote of its prediction sets
    labels: Mapping[str, Any] | None = None  # and of the thresholds of classes, in a file of several labels

    @property
    def several(self) -> bool:
        """True for a file that gives several labels an image; k is then how many classes a prediction shows."""
        return self.task == MULTILABEL

    @property
    def needed(self) -> tuple[str, str]:
        """The outputs that predictions are ranked by."""
        return "logits", "probabilities" if self.several else "marginals"

    @property
    def group_names(self) -> tuple[str, ...]:
        """The groups that have thresholds of their own."""
        return tuple(group["name"] for group in (self.sets or {}).get("groups", ()))

    def group_number(self, group: str) -> int:
        """The number of a group; raise :class:`ModelFileError` where the file has no threshold for it."""
        names = self.group_names
        if not names:
            raise ModelFileError(f"the file has no thresholds by group, got group {group!r}")
        if group not in names:
            raise ModelFileError(
                f"calibration has seen no group {group!r}; there are {', '.join(names)}. Without a group the largest "
                "of their thresholds serves"
            )
        return names.index(group)

    def to_props(self) -> dict[str, str]:
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "preprocess"}
        if self.labels is None:  # a file of one label says nothing of it
            del values["labels"]
        values |= asdict(self.preprocess) | {"schema": f"{SCHEMA}/{VERSION}"}
        return {key: json.dumps(value, ensure_ascii=False) for key, value in values.items()}

    @classmethod
    def from_props(cls, props: Mapping[str, str], source: str = "the model") -> "Metadata":
        """Parse the metadata of a model; raise :class:`ModelFileError` where it is absent, broken or newer."""
        if "schema" not in props:
            raise ModelFileError(
                f"{source} carries no topk_registry metadata (expected the key 'schema', found "
                f"{', '.join(map(repr, props)) or 'none'}): export it with `topk-registry export`"
            )
        try:
            values = {key: json.loads(props[key]) for key in _known() if key in props}
            _check_schema(json.loads(props["schema"]), source)
            sizes = {f.name: values.pop(f.name) for f in fields(Preprocess) if f.name in values}
            values["class_names"] = tuple(map(str, values["class_names"]))
            made = cls(preprocess=Preprocess(**sizes), **values)
        except ModelFileError:
            raise
        except (ValueError, TypeError, KeyError) as error:
            raise ModelFileError(f"the metadata of {source} is broken: {error}") from error
        if len(made.class_names) != made.num_classes:
            raise ModelFileError(
                f"the metadata of {source} is broken: {made.num_classes} classes, {len(made.class_names)} names"
            )
        return made


def _known() -> list[str]:
    return [f.name for kind in (Metadata, Preprocess) for f in fields(kind) if f.name != "preprocess"]


def _check_schema(schema: Any, source: str) -> None:
    name, _, version = str(schema).partition("/")
    if name != SCHEMA or not version.isdigit():
        raise ModelFileError(f"{source} has schema {schema!r}, expected {SCHEMA}/{VERSION} or older")
    if int(version) > VERSION:
        raise ModelFileError(
            f"{source} has schema {schema!r}, newer than this version reads ({SCHEMA}/{VERSION}): upgrade topk-registry"
        )
