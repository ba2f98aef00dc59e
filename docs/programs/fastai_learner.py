"""Train a model with fastai, mixup and a loss of topk_registry. Then save the learner, load it again, and predict.

``python fastai_learner.py images`` reads the images in ``images/train/CLASS`` and ``images/validation/CLASS``.
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
from fastai.vision.data import ImageDataLoaders

import topk_registry as tr


class RegisteredLoss(BaseLoss):
    """A loss of topk_registry for fastai. To predict, fastai calls ``activation``, then ``decodes`` on the result."""

    y_int = True  # labels are class indices, so fastai's MixUp mixes the losses of two labels

    def __init__(self, name: str, **options: object) -> None:
        super().__init__(partial(tr.create_loss, name), **options)

    def activation(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the top-k marginals [B, n], which docs/concepts/ksubset.md defines."""
        return tr.TopKHead.of_loss(self.func)(scores).marginals

    def decodes(self, marginals: torch.Tensor) -> torch.Tensor:
        return marginals.argmax(dim=-1)


class SetEpoch(Callback):
    """Callback that tells the loss the epoch, because some losses change an option from epoch to epoch."""

    def before_train(self):
        self.learn.loss_func.func.set_epoch(self.epoch)


def main(folder: str, output: str = "output/fastai") -> None:
    set_seed(0)
    batches = ImageDataLoaders.from_folder(folder, train="train", valid="validation", bs=50, num_workers=0)
    learner = Learner(
        batches,
        timm.create_model("test_resnet", num_classes=batches.c),
        loss_func=RegisteredLoss("smooth_topk_svm", k=5, label_smoothing=0.0),  # mixup already smooths labels
        metrics=[accuracy, partial(top_k_accuracy, k=5)],
        cbs=[SetEpoch(), MixUp(0.2)],
        path=Path(output),
    )
    with learner.no_bar(), learner.no_logging():
        learner.fit_one_cycle(2, 5e-3)
    for epoch, (_, loss, top1, top5) in enumerate(learner.recorder.values):
        print(f"epoch {epoch + 1}: loss {loss:.3f}, top-1 {top1:.3f}, top-5 {top5:.3f}")
    Path(output).mkdir(parents=True, exist_ok=True)
    learner.export("model.pkl")

    again = load_learner(Path(output) / "model.pkl")
    image = sorted(Path(folder, "validation").glob("*/*.png"))[0]
    with again.no_bar():
        best, _, marginals = again.predict(image)
    print(f"{image}: best class {best}; top-5 marginals:")
    for c in marginals.topk(5).indices.tolist():
        print(f"  {again.dls.vocab[c]} {marginals[c]:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
