"""Fine-tune a timm model with Accelerate and a loss of topk_registry. Then write an ONNX file.

``python accelerate_loop.py images`` reads ``images/train/CLASS`` and ``images/validation/CLASS``, and downloads the
weights of ``resnet18``. ``python accelerate_loop.py images NAME no`` trains another model from random weights. With
``accelerate launch`` in place of ``python``, the program uses several processes.
"""

import sys

import timm
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from folder_loaders import loaders  # docs/programs/folder_loaders.py

import topk_registry as tr
from topk_export import export_onnx
from topk_registry.metrics import TopKAccuracy

EPOCHS = 3


def main(folder: str, name: str = "resnet18", pretrained: str = "yes") -> None:
    set_seed(0)
    accelerator = Accelerator()  # with mixed_precision="bf16", the loss is still computed in float32
    train, held_out, classes, recipe = loaders(folder, name)
    model = timm.create_model(name, pretrained=pretrained == "yes", num_classes=len(classes))
    criterion = tr.create_loss("smooth_topk_svm", k=3, tau=1.0).to(accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=EPOCHS * len(train))
    parts = accelerator.prepare(model, optimizer, schedule, train, held_out)
    model, optimizer, schedule, train, held_out = parts
    for epoch in range(EPOCHS):
        criterion.set_epoch(epoch)  # some losses change an option from epoch to epoch
        model.train()
        for images, target in train:
            optimizer.zero_grad()
            accelerator.backward(criterion(model(images), target))
            optimizer.step()
            schedule.step()
        model.eval()
        accuracy = TopKAccuracy((1, 3), num_classes=len(classes))
        with torch.no_grad():
            for images, target in held_out:
                accuracy.update(*accelerator.gather_for_metrics((model(images), target)))
        found = accuracy.compute(sync=False)  # each process already has the predictions of all processes
        accelerator.print(f"epoch {epoch + 1}: top-1 {found['top1']:.3f}, top-3 {found['top3']:.3f}")
    if accelerator.is_main_process:
        network = accelerator.unwrap_model(model).cpu()
        temperature = criterion.marginal_temperature
        export_onnx(network, "accelerate.onnx", k=3, temperature=temperature, class_names=classes, data_config=recipe)


if __name__ == "__main__":
    main(*sys.argv[1:])
