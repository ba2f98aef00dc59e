"""Metadata of an exported ONNX file: the class names, k, the temperature, the preprocessing, and more.

The field ``metadata_props`` of the ONNX model stores the metadata as keys with JSON values. Therefore prediction needs
no other file than the ONNX file and its weights.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from topk_export.errors import ModelFileError
from topk_export.runtime.preprocess import Preprocess

SCHEMA = "topk_registry.classifier/1"
CLASSIFICATION, MULTILABEL = "classification", "multilabel"
TASKS = (CLASSIFICATION, MULTILABEL)

# names of optional inputs; an initializer of the same name contains the default
ALLOWED = "allowed"  # bool [1 or batch, n]; default: all True
ALPHA = "alpha"  # float32 [1]; only in calibrated files; default: the alpha of the calibration
# constants of calibrated files: the values of alpha [G] for which the file has thresholds, and thresholds [G, 1 or n]
ALPHAS, THRESHOLDS = "set_alphas", "set_thresholds"

# the name of each output, and a description
LOGITS = "logits"
OUTPUTS = {
    LOGITS: "outputs of the network, one per class [batch, num_classes], float32; the temperature and the input "
    "'allowed' do not change them",
    "marginals": "probability that each class is in a random set of k classes [batch, num_classes], float32; the "
    "values of a row sum to k; a class that is not allowed has the value 0; if at most k classes are allowed, each of "
    "them has the value 1",
    "probabilities": "softmax of the logits over the allowed classes [batch, num_classes], float32",
    "indices": "the k allowed classes with the largest logits [batch, k], int64, best class first; if fewer than k "
    "classes are allowed, the last entries are -1",
}
MULTILABEL_OUTPUTS = {
    LOGITS: OUTPUTS[LOGITS],
    "probabilities": "probability that each class is a label of the image [batch, num_classes], float32: "
    "sigmoid(logits / temperature), and 0 for classes that are not allowed",
}
SET_OUTPUTS = {
    "set": "whether each class is in the prediction set [batch, num_classes], bool; the metadata key 'sets' describes "
    "the calibration",
    "set_size": "number of classes in the prediction set [batch], int64",
}


@dataclass(frozen=True)
class Metadata:
    """Metadata of an exported ONNX file.

    Each field except ``preprocess`` is one key in the metadata of the ONNX model. In place of ``preprocess``, the
    metadata have one key for each field of :class:`Preprocess`.
    """

    k: int  # k of the top-k marginals; in multilabel files, the number of classes that a prediction lists
    temperature: float  # number by which the logits are divided before the marginals or the sigmoid
    num_classes: int
    class_names: tuple[str, ...]
    preprocess: Preprocess | None  # None: the file takes arrays, and no images
    in_graph: bool = False  # whether the input is uint8 [batch, height, width, channels], and the graph normalizes it
    outputs: Mapping[str, str] = field(default_factory=lambda: dict(OUTPUTS))
    task: str = CLASSIFICATION  # or MULTILABEL
    backbone: str = ""
    weights: str = ""  # "ema" (averaged weights of the checkpoint), "model" or "random"
    loss: str | None = None
    opset: int = 18
    dtype: str = "fp32"  # dtype of the part of the model that computes the logits: "fp32" or "fp16"
    checkpoint_sha256: str | None = None
    trained_on: Mapping[str, Any] | None = None  # data of the training run, and which images it held out; None: unknown
    license: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)  # versions of the packages that wrote the file
    external_weights: Mapping[str, str] | None = None  # name and SHA-256 of the file with the weights; None: no file
    batch: int | None = None  # fixed number of rows per run; 0 if the inputs have no batch axis; None for any number
    attached: Mapping[str, Any] | None = (
        None  # for a file of `attach`: the original file, and how the logits were found
    )
    sets: Mapping[str, Any] | None = None  # facts that a calibration records: score, rule, alpha, alphas, and more

    @property
    def multilabel(self) -> bool:
        """Whether one image may have several labels."""
        return self.task == MULTILABEL

    @property
    def images(self) -> Preprocess:
        """The preprocessing of images.

        Raises:
            ModelFileError: the file takes arrays and no images, or the mean and standard deviation are unknown.
        """
        if self.preprocess is None:
            raise ModelFileError(
                "the file takes arrays, not images: pass arrays (Predictor.run, on the command line --inputs), or "
                "attach the head again with the preprocessing of images (--preprocess FILE)"
            )
        self.preprocess.check_known()
        return self.preprocess

    @property
    def alphas(self) -> tuple[float, ...]:
        """Values of alpha for which the file has thresholds of prediction sets, in ascending order.

        alpha is the probability with which a prediction set may miss the true class. If the file is not calibrated, the
        tuple is empty.
        """
        return tuple((self.sets or {}).get("alphas", ()))

    def to_props(self) -> dict[str, str]:
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "preprocess"}
        values |= asdict(self.preprocess) if self.preprocess is not None else {}
        values["schema"] = SCHEMA
        return {key: json.dumps(value, ensure_ascii=False) for key, value in values.items()}

    @classmethod
    def from_props(cls, props: Mapping[str, str], source: str = "the model") -> "Metadata":
        """Parse ``props``, the metadata of an ONNX model. ``source`` is the name of the model in error messages.

        Raises:
            ModelFileError: the metadata are missing or broken.
        """
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
            made = cls(preprocess=Preprocess(**recipe) if recipe else None, **values)
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
