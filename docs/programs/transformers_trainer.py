"""Train a model with the Trainer of Hugging Face's transformers and a loss of topk_registry."""

import sys

import torch
from torch.utils.data import Dataset
from torchvision.transforms.functional import to_tensor
from transformers import (
    EvalPrediction,
    ResNetConfig,
    ResNetForImageClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import topk_registry as tr
from topk_registry.data.hierarchy import Hierarchy
from topk_registry.metrics import TopKAccuracy


class Images(Dataset):
    """Images as the Trainer expects them: each item is a dictionary with ``pixel_values`` and ``labels``."""

    def __init__(self, split: str, size: int) -> None:
        self.data = Hierarchy(split, size=size, superclasses=4)  # 20 classes in 4 families, images of 32 x 32

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> dict:
        image, label = self.data[i]
        return {"pixel_values": to_tensor(image), "labels": label}


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


def metrics(found: EvalPrediction) -> dict[str, float]:
    accuracy = TopKAccuracy((1, 5), num_classes=found.predictions.shape[1])
    accuracy.update(torch.from_numpy(found.predictions), torch.from_numpy(found.label_ids))
    return {"top1": accuracy.compute()["top1"], "top5": accuracy.compute()["top5"]}


def main(folder: str = "output/transformers") -> None:
    set_seed(0)
    shape = {"embedding_size": 32, "hidden_sizes": [32, 64, 128], "depths": [1, 1, 1], "layer_type": "basic"}
    model = ResNetForImageClassification(ResNetConfig(num_labels=20, **shape))
    loss = TrainerLoss("smooth_topk_svm", k=5)
    args = TrainingArguments(
        folder,
        num_train_epochs=2,
        per_device_train_batch_size=25,
        gradient_accumulation_steps=2,
        learning_rate=5e-3,
        lr_scheduler_type="cosine",
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
    )
    train, held_out = Images("train", 2000), Images("validation", 500)
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
        loss_and_accuracy = [found[f"eval_{name}"] for name in ("loss", "top1", "top5")]
        print("epoch {:.0f}: loss {:.3f}, top-1 {:.3f}, top-5 {:.3f}".format(found["epoch"], *loss_and_accuracy))
    trainer.save_model(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
