"""Fine-tune a timm model with Lightning and a loss of topk_registry. Then write an ONNX file from the checkpoint.

``python lightning_loop.py images`` reads ``images/train/CLASS`` and ``images/validation/CLASS``, and downloads the
weights of ``resnet18``. ``python lightning_loop.py images NAME no`` trains another model from random weights.
"""

import sys

import lightning
import timm
import torch
from folder_loaders import loaders  # docs/programs/folder_loaders.py

import topk_registry as tr
from topk_export import export_onnx
from topk_registry.metrics import TopKAccuracy


class Classifier(lightning.LightningModule):
    def __init__(self, name: str, num_classes: int, pretrained: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = timm.create_model(name, pretrained=pretrained, num_classes=num_classes)
        self.criterion = tr.create_loss("smooth_topk_svm", k=3, tau=1.0)  # Lightning moves submodules to the device
        self.accuracy = TopKAccuracy((1, 3), num_classes=num_classes)

    def on_train_epoch_start(self):
        self.criterion.set_epoch(self.current_epoch)  # some losses change an option from epoch to epoch

    def training_step(self, batch, index):
        images, target = batch
        return self.criterion(self.model(images), target)

    def validation_step(self, batch, index):
        images, target = batch
        self.accuracy.update(self.model(images), target)

    def on_validation_epoch_end(self):
        found = self.accuracy.compute()  # adds the counts of all processes
        self.accuracy.reset()
        self.log_dict({name: torch.tensor(value, dtype=torch.float32) for name, value in found.items()})
        print(f"epoch {self.current_epoch + 1}: top-1 {found['top1']:.3f}, top-3 {found['top3']:.3f}")

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.05)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(folder: str, name: str = "resnet18", pretrained: str = "yes") -> None:
    lightning.seed_everything(0)
    train, held_out, classes, recipe = loaders(folder, name)
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Classifier(name, len(classes), pretrained=pretrained == "yes"), train, held_out)
    trainer.save_checkpoint("lightning.ckpt")

    module = Classifier.load_from_checkpoint("lightning.ckpt", map_location="cpu", pretrained=False)
    temperature = module.criterion.marginal_temperature
    export_onnx(module.model, "lightning.onnx", k=3, temperature=temperature, class_names=classes, data_config=recipe)


if __name__ == "__main__":
    main(*sys.argv[1:])
