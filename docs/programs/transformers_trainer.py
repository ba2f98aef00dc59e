"""Fine-tune an image classifier with the Trainer of Hugging Face and a loss of topk_registry. Then write an ONNX file.

``python transformers_trainer.py images microsoft/resnet-18`` reads ``images/train/CLASS`` and
``images/validation/CLASS``, and downloads the model. The name of the model can also be a folder.
"""

import sys

import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    EvalPrediction,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import topk_registry as tr
from topk_export import export_onnx
from topk_registry.metrics import TopKAccuracy


class Images(Dataset):
    """Images as the Trainer expects them: each item is a dictionary with ``pixel_values`` and ``labels``."""

    def __init__(self, folder: str, processor: AutoImageProcessor) -> None:
        self.data, self.processor = ImageFolder(folder), processor

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> dict:
        image, label = self.data[i]
        return {"pixel_values": self.processor(image, return_tensors="pt")["pixel_values"][0], "labels": label}


class TrainerLoss(TrainerCallback):
    """A loss of topk_registry that the Trainer calls as the loss function, and also as a callback before each epoch.

    For one step of the optimizer, the Trainer adds the gradients of several batches: ``gradient_accumulation_steps``
    batches per process. ``num_items_in_batch`` is the number of labels in all these batches, without labels of -100.
    Each call returns the sum of the losses of one batch, divided by ``num_items_in_batch``. Therefore the sum of the
    gradients is the gradient of the mean loss over the images of the step.
    """

    def __init__(self, name: str, **options: object) -> None:
        self.loss = tr.create_loss(name, reduction="sum", **options)

    def __call__(self, outputs, labels, num_items_in_batch=None):
        count = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return self.loss(outputs["logits"], labels) / count

    def on_train_begin(self, args, state, control, **parts):
        self.loss.to(args.device)

    def on_epoch_begin(self, args, state, control, **parts):
        self.loss.set_epoch(int(state.epoch))  # some losses change an option from epoch to epoch


class Logits(torch.nn.Module):
    """The logits alone, which ``export_onnx`` needs."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model(images).logits


def metrics(found: EvalPrediction) -> dict[str, float]:
    accuracy = TopKAccuracy((1, 3), num_classes=found.predictions.shape[1])
    accuracy.update(torch.from_numpy(found.predictions), torch.from_numpy(found.label_ids))
    return {"top1": accuracy.compute()["top1"], "top3": accuracy.compute()["top3"]}


def main(folder: str, name: str, output: str = "output/transformers") -> None:
    set_seed(0)
    processor = AutoImageProcessor.from_pretrained(name)
    train, held_out = Images(f"{folder}/train", processor), Images(f"{folder}/validation", processor)
    classes = train.data.classes
    model = AutoModelForImageClassification.from_pretrained(name, num_labels=len(classes), ignore_mismatched_sizes=True)
    loss = TrainerLoss("smooth_topk_svm", k=3, tau=1.0)
    args = TrainingArguments(
        output,
        num_train_epochs=2,
        per_device_train_batch_size=25,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model,
        args,
        train_dataset=train,
        eval_dataset=held_out,
        compute_loss_func=loss,
        compute_metrics=metrics,
        callbacks=[loss],
    )
    trainer.train()
    for found in [entry for entry in trainer.state.log_history if "eval_loss" in entry]:
        loss_and_accuracy = [found[f"eval_{name}"] for name in ("loss", "top1", "top3")]
        print("epoch {:.0f}: loss {:.3f}, top-1 {:.3f}, top-3 {:.3f}".format(found["epoch"], *loss_and_accuracy))
    trainer.save_model(output)

    saved = Logits(AutoModelForImageClassification.from_pretrained(output)).eval()
    recipe = {"mean": processor.image_mean, "std": processor.image_std}
    recipe["crop_pct"] = getattr(processor, "crop_pct", None) or 1.0
    recipe["crop_mode"] = "center" if processor.size.get("shortest_edge") else "squash"  # without a fixed aspect ratio
    recipe["interpolation"] = Image.Resampling(processor.resample).name.lower()
    recipe["input_size"] = tuple(train[0]["pixel_values"].shape)
    temperature = loss.loss.marginal_temperature
    export_onnx(saved, "transformers.onnx", k=3, temperature=temperature, class_names=classes, data_config=recipe)


if __name__ == "__main__":
    main(*sys.argv[1:])
