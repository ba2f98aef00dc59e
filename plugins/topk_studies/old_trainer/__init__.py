"""The trainer that the studies still use; it goes when they are rewritten on `topk_registry.train`."""

from importlib import import_module

_HOMES = {"Run": "engine.run", "TrainConfig": "config.config", "Trainer": "engine.trainer"}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(f"topk_studies.old_trainer.{_HOMES[name]}"), name)
    raise AttributeError(name)
