"""The seams of timm's current train.py, in miniature: a module-level parser, a task that owns the loss, main()."""

import argparse
from collections import OrderedDict

import torch
import yaml
from timm.data import create_dataset, create_loader
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.models import create_model
from timm.task import ClassificationTask

parser = argparse.ArgumentParser()
parser.add_argument("--data-dir")
parser.add_argument("--model", default="test_resnet")
parser.add_argument("--num-classes", type=int)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--mixup", type=float, default=0.0)
parser.add_argument("--smoothing", type=float, default=0.1)
parser.add_argument("--args-file")


def main():
    args = parser.parse_args()
    with open(args.args_file, "w") as file:
        yaml.safe_dump(vars(args), file)
    model = create_model(args.model, num_classes=args.num_classes)
    dataset = create_dataset("", root=args.data_dir, split="train", is_training=True)
    device, policy = torch.device("cpu"), "rand-m10-n9-inc1"  # at magnitude 10, timm's posterize keeps 0 bits
    options = {"num_workers": 0, "device": device, "use_prefetcher": False, "auto_augment": policy}
    loader = create_loader(dataset, (3, 32, 32), 8, is_training=True, **options)
    loss = SoftTargetCrossEntropy() if args.mixup else LabelSmoothingCrossEntropy(args.smoothing)
    task = ClassificationTask(model=model, criterion=loss, device=torch.device("cpu"), verbose=False)
    optimizer = torch.optim.SGD(task.get_trainable_module().parameters(), lr=0.01)
    for epoch in range(args.epochs):
        metrics = train_one_epoch(epoch, model, loader, optimizer, args, task=task)
        print("epoch", epoch, metrics)


def train_one_epoch(epoch, model, loader, optimizer, args, task=None):
    total = 0.0
    for images, target in loader:
        if args.mixup:
            one_hot = torch.nn.functional.one_hot(target, args.num_classes).float()
            target = args.mixup * one_hot + (1 - args.mixup) * one_hot.flip(0)
        loss = task(images, target)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    return OrderedDict(loss=total / len(loader))


if __name__ == "__main__":
    main()
