"""Train a model with Lightning and a loss of topk_registry. The loss is a submodule of the LightningModule."""

import lightning
import timm
import torch
from own_loop import loader  # the data of docs/programs/own_loop.py

import topk_registry as tr
from topk_registry.metrics import TopKAccuracy


class Classifier(lightning.LightningModule):
    def __init__(self, num_classes: int, loss: str, **options: object) -> None:
        super().__init__()
        self.model = timm.create_model("test_resnet", num_classes=num_classes)
        self.criterion = tr.create_loss(loss, **options)  # Lightning moves submodules to the device
        self.accuracy = TopKAccuracy((1, 5), num_classes=num_classes)

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
        print(f"epoch {self.current_epoch + 1}: top-1 {found['top1']:.3f}, top-5 {found['top5']:.3f}")

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Classifier(20, "smooth_topk_svm", k=5), loader("train", 2000), loader("validation", 500))


if __name__ == "__main__":
    main()
