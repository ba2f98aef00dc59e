"""What is no tensor is refused by each loss of ours by name, with what was likely meant."""

import inspect
from types import SimpleNamespace

import pytest
import torch

import topk_registry as tr

LOGITS, LABELS = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3])
NO_LOGITS = {
    "numpy": (LOGITS.numpy(), "got ndarray: torch.as_tensor makes one of numbers"),
    "tuple": ((LOGITS, LOGITS), "got tuple: pass one of its tensors"),
    "dict": ({"logits": LOGITS}, "got dict: pass its logits"),
    "output": (SimpleNamespace(logits=LOGITS), "got SimpleNamespace: pass its logits"),
    "none": (None, "got NoneType"),
}


def loss_of(name: str) -> torch.nn.Module:
    parameters = inspect.signature(tr.get_loss_builder(name)).parameters
    counts = {"class_counts": [3, 2, 1, 1, 1, 1]} if "class_counts" in parameters else {}
    return tr.create_loss(name, **counts, **({"k": 2} if "k" in parameters else {}))


@pytest.mark.parametrize("name", tr.list_losses("topk-registry:*"))
def test_no_tensors(name):
    loss = loss_of(name)
    for given, message in NO_LOGITS.values():
        with pytest.raises(TypeError, match=f"logits must be a tensor, {message}"):
            loss(given, LABELS)
    for target in ([0, 1, 2, 3], LABELS.numpy(), None):
        with pytest.raises(TypeError, match=f"target must be a tensor, got {type(target).__name__}"):
            loss(LOGITS, target)


def test_functions_of_rows_say_the_same():
    with pytest.raises(TypeError, match="scores must be a tensor, got ndarray"):
        tr.rows.row_losses(tr.rows.softmax_rows(), LOGITS.numpy(), LABELS)
    with pytest.raises(TypeError, match="target must be a tensor, got list"):
        tr.rows.row_losses(tr.rows.softmax_rows(), LOGITS, [0, 1, 2, 3])


def test_class_weights_are_shown():
    assert "weight of 6 classes" in repr(tr.create_loss("focal", weight=torch.ones(6)))
    assert "weight" not in repr(tr.create_loss("focal"))


def test_an_assertion_about_an_option_is_no_broken_plug_in():
    with pytest.raises(ValueError, match=r"loss 'ce' of timm .* does not accept smoothing=2: assert smoothing < 1"):
        tr.create_loss("ce", smoothing=2)


def test_the_loss_in_the_place_of_its_factory():
    def mine(logits, target):
        return torch.nn.functional.cross_entropy(logits, target)

    tr.register_loss("mine_itself")(mine)
    try:
        with pytest.raises(TypeError, match=r"must be a factory, .* got a function of logits, target, the loss itself"):
            tr.create_loss("mine_itself")
    finally:
        tr.registry.losses.unregister("mine_itself")
