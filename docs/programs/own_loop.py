"""Train a model in a plain PyTorch loop, with a loss of topk_registry in place of ``nn.CrossEntropyLoss``."""

import timm
import torch
from torch.utils.data import DataLoader
from torchvision.transforms.functional import to_tensor

import topk_registry as tr
from topk_registry.data.hierarchy import Hierarchy
from topk_registry.metrics import TopKAccuracy


def loader(split: str, size: int) -> DataLoader:
    data = Hierarchy(split, size=size, superclasses=4)  # 20 classes in 4 families, images of 32 x 32
    data.transform = to_tensor
    return DataLoader(data, batch_size=50, shuffle=split == "train")


def main() -> None:
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=20)
    criterion = tr.create_loss("smooth_topk_svm", k=5, tau=1.0)  # in place of nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    train, held_out = loader("train", 2000), loader("validation", 500)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=3 * len(train))
    for epoch in range(3):
        criterion.set_epoch(epoch)  # some losses change an option from epoch to epoch
        model.train()
        for images, target in train:
            optimizer.zero_grad()
            criterion(model(images), target).backward()
            optimizer.step()
            schedule.step()
        model.eval()
        accuracy = TopKAccuracy((1, 5), num_classes=20)
        with torch.no_grad():
            for images, target in held_out:
                accuracy.update(model(images), target)
        found = accuracy.compute()
        print(f"epoch {epoch + 1}: top-1 {found['top1']:.3f}, top-5 {found['top5']:.3f}")


if __name__ == "__main__":
    main()
