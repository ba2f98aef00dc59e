"""Train a classifier of Ultralytics on a folder of images: its trainer, with a registered loss as the criterion."""

import sys
from pathlib import Path

import torch
from ultralytics import YOLO
from ultralytics.models.yolo.classify import ClassificationTrainer
from ultralytics.utils.torch_utils import unwrap_model

import topk_registry as tr


class Criterion(torch.nn.Module):
    """A registered loss as the models call it: with a batch, and with the loss by name in the result."""

    def __init__(self, name: str, **options: object) -> None:
        super().__init__()
        self.loss = tr.create_loss(name, **options)

    def forward(self, scores, batch):
        scores = scores[1] if isinstance(scores, tuple) else scores  # in evaluation: probabilities and scores
        value = self.loss(scores, batch["cls"])
        return value, {"loss": value.detach()}


class TopKTrainer(ClassificationTrainer):
    """The trainer of classifiers; a model keeps the criterion that it has, and makes its own where it has none."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.add_callback("on_train_epoch_start", tell_epoch)

    def get_model(self, *args, **kwargs):
        model = super().get_model(*args, **kwargs)
        model.criterion = Criterion("smooth_topk_svm", k=5)
        return model


def tell_epoch(trainer: TopKTrainer) -> None:
    unwrap_model(trainer.model).criterion.loss.set_epoch(trainer.epoch)  # for losses with a schedule


def main(folder: str, output: str = "output/ultralytics") -> None:
    model = YOLO("yolov8n-cls.yaml")  # the architecture alone, which comes with the package
    data = {"data": str(Path(folder).resolve()), "imgsz": 64, "workers": 0, "plots": False, "verbose": False}
    plain = {"auto_augment": None, "erasing": 0.0, "scale": 0.0, "hsv_h": 0.0, "hsv_s": 0.0, "hsv_v": 0.0}
    place = {"project": str(Path(output).resolve()), "name": "run", "exist_ok": True}
    steps = {"epochs": 2, "batch": 25, "optimizer": "AdamW", "lr0": 2e-3, "warmup_epochs": 0.5, "seed": 0}
    model.train(trainer=TopKTrainer, **data, **plain, **place, **steps)

    again = YOLO(model.trainer.best)
    found = again.val(batch=50, **data, **place)
    print(f"top-1 {found.top1:.3f}, top-5 {found.top5:.3f}")
    image = sorted(Path(folder, "val").glob("*/*.png"))[0]
    (result,) = again(image, imgsz=64, verbose=False)
    print(f"{image}:", ", ".join(result.names[c] for c in result.probs.top5))


if __name__ == "__main__":
    main(*sys.argv[1:])
