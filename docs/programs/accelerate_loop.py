"""Train a model with Accelerate and a loss of topk_registry.

``python accelerate_loop.py`` uses one process. ``accelerate launch accelerate_loop.py`` uses several processes.
"""

import timm
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from own_loop import loader  # the data of docs/programs/own_loop.py

import topk_registry as tr
from topk_registry.metrics import TopKAccuracy


def main() -> None:
    set_seed(0)
    accelerator = Accelerator()  # with mixed_precision="bf16", the loss is still computed in float32
    model = timm.create_model("test_resnet", num_classes=20)
    criterion = tr.create_loss("smooth_topk_svm", k=5).to(accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    train = loader("train", 2000)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=3 * len(train))
    parts = accelerator.prepare(model, optimizer, schedule, train, loader("validation", 500))
    model, optimizer, schedule, train, held_out = parts
    for epoch in range(3):
        criterion.set_epoch(epoch)  # some losses change an option from epoch to epoch
        model.train()
        for images, target in train:
            optimizer.zero_grad()
            accelerator.backward(criterion(model(images), target))
            optimizer.step()
            schedule.step()
        model.eval()
        accuracy = TopKAccuracy((1, 5), num_classes=20)
        with torch.no_grad():
            for images, target in held_out:
                accuracy.update(*accelerator.gather_for_metrics((model(images), target)))
        found = accuracy.compute(sync=False)  # each process already has the predictions of all processes
        accelerator.print(f"epoch {epoch + 1}: top-1 {found['top1']:.3f}, top-5 {found['top5']:.3f}")


if __name__ == "__main__":
    main()
