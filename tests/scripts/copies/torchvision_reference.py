"""The seams of torchvision's references/classification/train.py, in miniature."""

import neighbour
import torch
import torchvision


def train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, args):
    model.train()
    for image, target in data_loader:
        if args.mixup_alpha:
            target = torch.nn.functional.one_hot(target, len(data_loader.dataset.classes)).float()
        loss = criterion(model(image.to(device)), target.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("epoch", epoch, "trained with", type(criterion).__name__)


def evaluate(model, criterion, data_loader, device):
    model.eval()
    with torch.inference_mode():
        for image, target in data_loader:
            criterion(model(image.to(device)), target.to(device))
    print("evaluated with", type(criterion).__name__)


def main(args):
    device = torch.device(args.device)
    dataset = torchvision.datasets.ImageFolder(f"{args.data_path}/train", neighbour.transform())
    loader = torch.utils.data.DataLoader(dataset, 8, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 24 * 24, len(dataset.classes))).to(device)
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    if args.test_only:
        evaluate(model, criterion, loader, device)
        return
    for epoch in range(args.epochs):
        train_one_epoch(model, criterion, optimizer, loader, device, epoch, args)
        evaluate(model, criterion, loader, device)


def get_args_parser():
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--data-path")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--label-smoothing", type=float, default=0.0)
    parser.add_argument("--mixup-alpha", type=float, default=0.0)
    parser.add_argument("--test-only", action="store_true")
    return parser


if __name__ == "__main__":
    main(get_args_parser().parse_args())
