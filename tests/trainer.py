"""A linear layer and a few rows for the Trainer of transformers, in the test's process and in others."""

import torch


class Rows(torch.utils.data.Dataset):
    """Features with labels, of which some are ignored; or with distributions over the classes."""

    def __init__(self, dense: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.features = torch.randn(24, 8, generator=generator)
        self.labels = torch.randint(6, (24,), generator=generator)
        self.labels[[1, 2, 3, 13]] = -100
        if dense:
            self.labels = torch.randn(24, 6, generator=generator).softmax(-1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict:
        return {"features": self.features[i], "labels": self.labels[i]}


class Linear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 6)
        torch.nn.init.normal_(self.layer.weight, generator=torch.Generator().manual_seed(1))
        torch.nn.init.zeros_(self.layer.bias)

    def forward(self, features, labels=None):
        return {"logits": self.layer(features)}


def trained(loss, data, **options):
    """A linear layer after an epoch of plain gradient descent by the Trainer, and the loss that it then reports."""
    from transformers import Trainer, TrainingArguments  # a package of its own, not installed everywhere

    settings = {"num_train_epochs": 1, "learning_rate": 0.5, "optim": "sgd", "lr_scheduler_type": "constant"}
    settings |= {"max_grad_norm": 0.0, "save_strategy": "no", "report_to": "none", "use_cpu": True}
    settings |= {"remove_unused_columns": False, "label_names": ["labels"], "disable_tqdm": True}
    model = Linear()
    args = TrainingArguments("trainer", **settings, **options)
    trainer = Trainer(model, args, train_dataset=data, eval_dataset=data, compute_loss_func=loss, callbacks=[loss])
    trainer.train()
    return model.layer.requires_grad_(False), trainer.evaluate()["eval_loss"]
