"""Train a torchvision model with a loss of topk_registry, and with torchvision's transforms and mixup.

``python torchvision_loop.py images`` reads the images in ``images/train/CLASS`` and ``images/validation/CLASS``.
"""

import sys

import torch
from torch.utils.data import DataLoader, default_collate
from torchvision import datasets, models
from torchvision.transforms import v2

import topk_registry as tr


def main(folder: str) -> None:
    torch.manual_seed(0)
    transform = v2.Compose([v2.Resize(32), v2.CenterCrop(32), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    train = datasets.ImageFolder(f"{folder}/train", v2.Compose([v2.RandomHorizontalFlip(), transform]))
    held_out = datasets.ImageFolder(f"{folder}/validation", transform)
    n = len(train.classes)
    mixup = v2.MixUp(alpha=0.2, num_classes=n)  # turns class indices [B] into probabilities [B, n]

    def mixed(samples: list) -> tuple[torch.Tensor, torch.Tensor]:
        return mixup(*default_collate(samples))

    model = models.resnet18(num_classes=n)
    criterion = tr.create_loss("smooth_topk_svm", k=min(3, n - 1), label_smoothing=0.0)  # mixup already smooths labels
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = DataLoader(train, batch_size=20, shuffle=True, drop_last=True, collate_fn=mixed)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=3 * len(batches))
    for epoch in range(3):
        criterion.set_epoch(epoch)  # some losses change an option from epoch to epoch
        model.train()
        for images, target in batches:
            optimizer.zero_grad()
            criterion(model(images), target).backward()
            optimizer.step()
            schedule.step()
        model.eval()
        hits = 0
        with torch.no_grad():
            for images, target in DataLoader(held_out, batch_size=50):
                hits += int((model(images).topk(min(3, n)).indices == target[:, None]).sum())
        print(f"epoch {epoch + 1}: top-3 {hits / len(held_out):.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
