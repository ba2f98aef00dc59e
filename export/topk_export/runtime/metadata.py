"""Metadata of an exported file: JSON values under plain keys in ``metadata_props`` of the ONNX model.

Prediction needs no other file, because the metadata has the class names, k, the temperature and the preprocessing.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from topk_export.errors import ModelFileError
from topk_export.runtime.preprocess import Preprocess

SCHEMA = "topk_registry.classifier/1"
CLASSIFICATION, MULTILABEL = "classification", "multilabel"

# optional inputs: an initializer has the default
ALLOWED = "allowed"  # bool [1 or batch, n]; default: all true
ALPHA = "alpha"  # float32 [1]; only in calibrated files; default: the alpha of the calibration
ALPHAS, THRESHOLDS = "set_alphas", "set_thresholds"  # constants of calibrated files: levels [G], thresholds [G, 1 or n]

LOGITS = "logits"
OUTPUTS = {
    LOGITS: "scores [batch, num_classes], float32, from the backbone: not divided by the temperature, not restricted "
    "by a class list",
    "marginals": "probability that each class is in the top-k set [batch, num_classes], float32; a row sums to k, it "
    "is not a softmax; excluded classes are 0, and with at most k allowed classes each of them is 1",
    "probabilities": "softmax of the logits over the allowed classes [batch, num_classes], float32",
    "indices": "the k allowed classes with the largest scores [batch, k], int64, best first; -1 if fewer are allowed",
}
MULTILABEL_OUTPUTS = {
    LOGITS: OUTPUTS[LOGITS],
    "probabilities": "probability that each class is a label of the image [batch, num_classes], float32: the sigmoid "
    "of logits / temperature per class, 0 for excluded classes",
}
SET_OUTPUTS = {
    "set": "whether each class is in the prediction set [batch, num_classes], bool; see 'sets'",
    "set_size": "number of classes in the prediction set [batch], int64",
}


def outputs_of(task: str) -> dict[str, str]:
    """Return the outputs of a file for a task: the meaning of each output, by name."""
    return dict(MULTILABEL_OUTPUTS if task == MULTILABEL else OUTPUTS)


@dataclass(frozen=True)
class Metadata:
    """The schema of an exported file. Each field is one key of the metadata, and so is each field of ``preprocess``."""

    k: int  # size of the set for the marginals; in multilabel files, the number of classes that a prediction lists
    temperature: float  # number by which logits are divided before marginals or sigmoid
    num_classes: int
    class_names: tuple[str, ...]
    preprocess: Preprocess
    in_graph: bool = False  # the graph takes uint8 [batch, height, width, channels] and normalizes the images
    outputs: Mapping[str, str] = field(default_factory=lambda: dict(OUTPUTS))
    task: str = CLASSIFICATION  # or MULTILABEL
    backbone: str = ""
    weights: str = ""  # "ema" or "model": the exported weights of the checkpoint
    loss: str | None = None
    opset: int = 18
    dtype: str = "fp32"  # dtype of the backbone: "fp32" or "fp16"
    checkpoint_sha256: str | None = None
    license: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)  # versions of the packages that wrote the file
    weights_sha256: str | None = None  # SHA-256 of the file with external weights
    sets: Mapping[str, Any] | None = None  # written by `topk-registry calibrate`: score, rule, alpha, alphas, options

    @property
    def multilabel(self) -> bool:
        """Whether images may have several labels."""
        return self.task == MULTILABEL

    @property
    def alphas(self) -> tuple[float, ...]:
        """Miscoverage levels with thresholds in the file, in ascending order. Without a calibration, there are none."""
        return tuple((self.sets or {}).get("alphas", ()))

    def to_props(self) -> dict[str, str]:
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "preprocess"}
        values |= asdict(self.preprocess) | {"schema": SCHEMA}
        return {key: json.dumps(value, ensure_ascii=False) for key, value in values.items()}

    @classmethod
    def from_props(cls, props: Mapping[str, str], source: str = "the model") -> "Metadata":
        """Parse the metadata of a model. Raise :class:`ModelFileError` if the metadata is missing or broken."""
        if "schema" not in props:
            raise ModelFileError(
                f"{source} has no topk_registry metadata (expected the key 'schema', found "
                f"{', '.join(map(repr, props)) or 'none'}): export it with `topk-registry export`"
            )
        try:
            schema = json.loads(props["schema"])
            if schema != SCHEMA:
                raise ModelFileError(f"{source} has schema {schema!r}, this version reads {SCHEMA!r}")
            values = {key: json.loads(props[key]) for key in _keys() if key in props}
            recipe = {f.name: values.pop(f.name) for f in fields(Preprocess) if f.name in values}
            values["class_names"] = tuple(map(str, values["class_names"]))
            made = cls(preprocess=Preprocess(**recipe), **values)
        except ModelFileError:
            raise
        except (ValueError, TypeError, KeyError) as error:
            raise ModelFileError(f"the metadata of {source} is broken: {error}") from error
        if len(made.class_names) != made.num_classes:
            raise ModelFileError(
                f"the metadata of {source} is broken: {made.num_classes} classes, {len(made.class_names)} names"
            )
        return made


def _keys() -> list[str]:
    return [f.name for kind in (Metadata, Preprocess) for f in fields(kind) if f.name != "preprocess"]
