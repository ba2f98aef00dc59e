"""Two data-parallel processes: nothing of a process is lost over an interrupt, and a mean is that of one process."""

import os

import pytest
import torch
import torch.distributed as dist
from timm.utils.checkpoint_saver import load_checkpoint_metadata

from tests import ranks
from tests.train.ranked import FOLDER, assert_same, last, stopped, trained
from topk_registry import registry
from topk_registry.train import TrainConfig

if not dist.is_available():
    pytest.skip("torch is built without distributed", allow_module_level=True)

CHECKS = {}
CONFIG = TrainConfig(
    dataset="topk/hierarchy", dataset_opt={"size": 48, "superclasses": 4, "fine": 3, "noise": 1.0},
    model="topk_convnet", model_kwargs={"width": 2, "norm": True}, no_aug=True, device="cpu", workers=0,
    epochs=2, opt="adamw", lr=0.01, warmup_epochs=0, smoothing=0.0, batch_size=6, validation_batch_size=7,
)  # fmt: skip
RESUMED = {
    "average": {"model_ema": True, "model_ema_decay": 0.7},
    "unshared buffers": {"no_ddp_bb": True, "dist_bn": ""},
    "loss with a state": {"loss": "counting", "model_ema": True},
    "spread classes": {"loss": "topk_nll", "loss_opt": {"k": 2}, "class_parallel": True, "model_ema": True},
}


class Counting(torch.nn.Module):
    """A loss that goes by the scores that its own process has seen."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, logits, target):
        if logits.requires_grad:
            self.seen += logits.detach().abs().mean()
        return torch.nn.functional.cross_entropy(logits / (1 + self.seen), target)


def check(function):
    CHECKS[function.__name__] = function
    return function


@check
def stopped_runs_and_whole_ones():
    registry.register_loss("counting")(Counting)
    for name, options in RESUMED.items():
        config = CONFIG.replace(**options)
        trained(config, f"{name}-whole")
        stopped(config, f"{name}-stopped", epoch=0, step=3)
        torch.randn(7)  # the second part runs elsewhere: nothing may be left in the process
        stopped(config.replace(resume=str(last(f"{name}-stopped"))), f"{name}-stopped", epoch=1, step=1)
        dist.barrier()
        trained(config.replace(resume=str(last(f"{name}-stopped"))), f"{name}-stopped")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(folder))
        patch.setenv("TOPK_REGISTRY_BACKEND", "torch")
        yield ranks.run(2, CHECKS, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_ranks(found, name):
    wrong = [error for error in found[name] if error]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_two_processes_that_were_stopped_twice_end_as_two_that_were_not(found, name):
    assert os.environ[FOLDER]
    whole, resumed = (load_checkpoint_metadata(last(f"{name}-{kind}")) for kind in ("whole", "stopped"))
    for key in ("state_dict", "state_dict_ema", "optimizer", "task_state"):
        assert_same(whole.get(key), resumed.get(key), key)
