"""The seams of timm's train.py before it had tasks: the loss is an argument of train_one_epoch."""

import argparse

import torch
from timm.data import create_dataset, create_loader
from timm.models import create_model

parser = argparse.ArgumentParser()
parser.add_argument("--data-dir")
parser.add_argument("--num-classes", type=int)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument(
    "--own-loss-from", type=int, help="from this step on, train with another loss than the one passed on"
)


def main():
    args = parser.parse_args()
    model = create_model("test_resnet", num_classes=args.num_classes)
    dataset = create_dataset("", root=args.data_dir, split="train", is_training=True)
    device, policy = torch.device("cpu"), "rand-m10-n9-inc1"  # at magnitude 10, timm's posterize keeps 0 bits
    options = {"num_workers": 0, "device": device, "use_prefetcher": False, "auto_augment": policy}
    loader = create_loader(dataset, (3, 32, 32), 8, is_training=True, **options)
    train_loss_fn = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(args.epochs):
        train_one_epoch(epoch, model, loader, optimizer, train_loss_fn, args, device=torch.device("cpu"))


def train_one_epoch(epoch, model, loader, optimizer, loss_fn, args, device=None):
    for step, (images, target) in enumerate(loader):
        if step == args.own_loss_from:
            with torch.no_grad():
                loss_fn(model(images), target)  # looked at, and not trained with
            loss_fn = torch.nn.functional.cross_entropy
        loss = loss_fn(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("step", loss.item())


if __name__ == "__main__":
    main()
