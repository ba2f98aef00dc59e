"""Fine-tune a timm model with fastai, mixup and a loss of topk_registry. Then save the learner, and write an ONNX file.

``python fastai_learner.py images`` reads ``images/train/CLASS`` and ``images/validation/CLASS``, and downloads the
weights of ``resnet18``. ``python fastai_learner.py images NAME no`` trains another model from random weights.
"""

import sys
from functools import partial
from pathlib import Path

import timm
import torch
from fastai.callback.core import Callback
from fastai.callback.mixup import MixUp
from fastai.callback.schedule import fit_one_cycle  # noqa: F401  this import adds the method to learners
from fastai.learner import Learner, load_learner
from fastai.losses import BaseLoss
from fastai.metrics import accuracy, top_k_accuracy
from fastai.torch_core import set_seed
from fastai.vision.augment import Resize
from fastai.vision.data import ImageDataLoaders, Normalize
from timm.data import resolve_data_config

import topk_registry as tr
from topk_export import export_onnx


class RegisteredLoss(BaseLoss):
    """A loss of topk_registry for fastai. To predict, fastai calls ``activation``, then ``decodes`` on the result."""

    y_int = True  # labels are class indices, so fastai's MixUp mixes the losses of two labels

    def __init__(self, name: str, **options: object) -> None:
        super().__init__(partial(tr.create_loss, name), **options)

    def activation(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the top-k marginals [B, n], which docs/concepts/ksubset.md defines."""
        return tr.TopKHead.of_loss(self.func)(logits).marginals

    def decodes(self, marginals: torch.Tensor) -> torch.Tensor:
        return marginals.argmax(dim=-1)


class SetEpoch(Callback):
    """Callback that tells the loss the epoch, because some losses change an option from epoch to epoch."""

    def before_train(self):
        self.learn.loss_func.func.set_epoch(self.epoch)


def main(folder: str, name: str = "resnet18", pretrained: str = "yes", output: str = "output/fastai") -> None:
    set_seed(0)
    recipe = resolve_data_config(pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
    batches = ImageDataLoaders.from_folder(
        folder,
        train="train",
        valid="validation",
        bs=50,
        num_workers=0,
        item_tfms=Resize(recipe["input_size"][-1]),
        batch_tfms=Normalize.from_stats(recipe["mean"], recipe["std"]),
    )
    learner = Learner(
        batches,
        timm.create_model(name, pretrained=pretrained == "yes", num_classes=batches.c),
        loss_func=RegisteredLoss("smooth_topk_svm", k=3, tau=1.0, label_smoothing=0.0),  # mixup already smooths labels
        metrics=[accuracy, partial(top_k_accuracy, k=3)],
        cbs=[SetEpoch(), MixUp(0.2)],
        path=Path(output),
    )
    with learner.no_bar(), learner.no_logging():
        learner.fit_one_cycle(2, 1e-3)
    for epoch, (_, loss, top1, top3) in enumerate(learner.recorder.values):
        print(f"epoch {epoch + 1}: loss {loss:.3f}, top-1 {top1:.3f}, top-3 {top3:.3f}")
    Path(output).mkdir(parents=True, exist_ok=True)
    learner.export("model.pkl")

    again = load_learner(Path(output) / "model.pkl")
    image = sorted(Path(folder, "validation").glob("*/*.png"))[0]
    with again.no_bar():
        best, _, marginals = again.predict(image)
    print(f"{image}: best class {best}; top-3 marginals:")
    for c in marginals.topk(3).indices.tolist():
        print(f"  {again.dls.vocab[c]} {marginals[c]:.2f}")

    network, classes = learner.model.cpu(), list(batches.vocab)
    temperature = learner.loss_func.func.marginal_temperature
    data_config = recipe | {"crop_pct": 1.0}  # Resize above crops nothing but the longer side
    export_onnx(network, "fastai.onnx", k=3, temperature=temperature, class_names=classes, data_config=data_config)


if __name__ == "__main__":
    main(*sys.argv[1:])
