"""Two data-parallel processes: nothing of a process is lost over an interrupt, and a mean is that of one process."""

import pytest
import torch
import torch.distributed as dist
from timm.utils.checkpoint_saver import load_checkpoint_metadata
from torch.distributed.fsdp import fully_shard

from tests import ranks
from tests.train.ranked import assert_same, last, same_checkpoint, stopped, trained, trained_on_two
from topk_registry import create_loss, mean_over_ranks, registry
from topk_registry.train import TrainConfig

if not dist.is_available():
    pytest.skip("torch is built without distributed", allow_module_level=True)

CHECKS = {}
CONFIG = TrainConfig(
    dataset="topk/hierarchy", dataset_opt={"size": 48, "superclasses": 4, "fine": 3, "pixel_noise": 1.0},
    model="topk_convnet", model_kwargs={"width": 2, "norm": True}, no_aug=True, device="cpu", workers=0,
    epochs=2, opt="adamw", lr=0.01, warmup_epochs=0, smoothing=0.0, batch_size=6, validation_batch_size=7,
)  # fmt: skip
RESUMED = {
    "average": {"model_ema": True, "model_ema_decay": 0.7},
    "unshared buffers": {"no_ddp_bb": True, "dist_bn": ""},
    "loss with a state": {"loss": "counting", "model_ema": True},
    "drawn classes": {"sampler": "sqrt", "long_tail": "exp", "imbalance_factor": 2.0, "batch_size": 4},
    "trained head": {"retrain_head": "average-whole", "model_ema": True, "model_ema_decay": 0.7},
    "several labels": {
        "task": "multilabel", "dataset": "topk/several", "dataset_opt": {"size": 48, "things": 6}, "loss": "asl",
        "eval_metric": "map", "model_ema": True,
    },
}  # fmt: skip


WEIGHTED = CONFIG.replace(
    model_kwargs={"width": 2}, loss="focal", loss_opt={"weight": torch.logspace(-1, 1, 12).tolist()}, num_classes=12
)
COMPARED = {
    "weight": {},
    "two batches an update": {"grad_accum_steps": 2, "batch_size": 3, "clip_grad": 0.5},
    "drw": {"loss": "ldam", "loss_opt": {"drw_epoch": 1, "beta": 0.9}, "long_tail": "exp", "imbalance_factor": 10.0},
    "weights by name": {"loss_opt": {}, "class_weight": "inv_freq", "long_tail": "exp", "imbalance_factor": 4.0},
    "drawn classes": {"sampler": "class_balanced", "long_tail": "exp", "imbalance_factor": 4.0},
    "several labels": {
        "task": "multilabel", "dataset": "topk/several", "dataset_opt": {"size": 48, "things": 12, "eval_size": 31},
        "loss": "ksubset_nll", "loss_opt": {}, "class_weight": "inv_freq", "eval_metric": "map",
        "grad_accum_steps": 2, "batch_size": 3,
    },
}  # fmt: skip
ALONE = {"batch_size": 12, "grad_accum_steps": 1}


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
        if config.retrain_head:  # of an earlier run
            dist.barrier()
            config = config.replace(retrain_head=str(last(config.retrain_head)))
        trained(config, f"{name}-whole")
        stopped(config, f"{name}-stopped", epoch=0, step=3)
        torch.randn(7)  # the second part runs elsewhere: nothing may be left in the process
        stopped(config.replace(resume=str(last(f"{name}-stopped"))), f"{name}-stopped", epoch=1, step=1)
        dist.barrier()
        trained(config.replace(resume=str(last(f"{name}-stopped"))), f"{name}-stopped")


@check
def runs_to_compare():
    for name, options in COMPARED.items():
        trained(WEIGHTED.replace(**options), f"{name}-two")


@check
def an_own_loop_has_the_mean_of_all_rows():
    generator = torch.Generator().manual_seed(0)
    rows = [5, 2][dist.get_rank()]  # ranks may have different numbers of rows
    features, target = torch.randn(7, 6, generator=generator), torch.tensor([3, 0, 1, 4, -100, 2, 2])
    weight, start = torch.logspace(-1, 1, 6), torch.randn(6, 6, generator=generator)
    parts = [(features[:5], target[:5]), (features[5:], target[5:])]
    ddp = torch.nn.parallel.DistributedDataParallel
    cases = [("focal", False, ddp), ("topk_nll", False, ddp), ("focal", True, ddp), ("focal", False, fully_shard)]
    for name, soft, wrap in cases:
        options = {"weight": weight, "label_smoothing": 0.1 * (not soft)}
        layers = [torch.nn.Linear(6, 6, bias=False) for _ in range(2)]
        for layer in layers:
            layer.weight.data.copy_(start)
        model = wrap(layers[1])
        loss = mean_over_ranks(create_loss(name, **options))
        whole, own = (features, target), parts[dist.get_rank()]
        if soft:
            whole, own = ((x, x.softmax(1)) for x in (whole[0], own[0]))
        create_loss(name, **options)(layers[0](whole[0]), whole[1]).backward()
        value = loss(model(own[0]), own[1])
        value.backward()
        assert len(own[0]) == rows
        gradient = layers[1].weight.grad
        gradient = gradient.full_tensor() if wrap is fully_shard else gradient
        torch.testing.assert_close(gradient, layers[0].weight.grad, rtol=1e-5, atol=1e-6)
        mean = value.detach().clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / 2, create_loss(name, **options)(layers[0](whole[0]), whole[1]))
        if dist.get_rank() == 0:  # without gradients the ranks need not meet
            with torch.no_grad():
                torch.testing.assert_close(loss(*own), create_loss(name, **options)(*own))


@check
def a_rank_whose_rows_are_all_ignored_adds_nothing():
    logits = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    target = torch.full((3,), -100) if dist.get_rank() else torch.tensor([0, 1, 2])
    value = mean_over_ranks(create_loss("focal"))(logits, target)
    value.backward()
    expected = create_loss("focal")(logits.detach(), torch.tensor([0, 1, 2])) * 2
    torch.testing.assert_close(value, torch.zeros(()) if dist.get_rank() else expected)
    assert bool(logits.grad.isfinite().all())


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    with trained_on_two(CHECKS, tmp_path_factory.mktemp("runs")) as errors:
        yield errors


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_ranks(found, name):
    ranks.expect_none(found[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_two_processes_that_were_stopped_twice_end_as_two_that_were_not(found, name):
    whole, resumed = (load_checkpoint_metadata(last(f"{name}-{kind}")) for kind in ("whole", "stopped"))
    for key in ("state_dict", "state_dict_ema", "optimizer", "task_state"):
        assert_same(whole.get(key), resumed.get(key), key)


@pytest.mark.slow
def test_a_head_in_two_processes_leaves_the_features_as_they_were(found):
    before, after = (load_checkpoint_metadata(last(f"{name}-whole")) for name in ("average", "trained head"))
    for name, value in before["state_dict_ema"].items():
        for state in ("state_dict", "state_dict_ema"):
            kept = torch.equal(value.float(), after[state][name].float())  # models are built in single precision
            assert kept != name.startswith("fc."), name


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPARED)
def test_a_weighted_mean_in_two_processes_is_that_of_one(found, name):
    trained(WEIGHTED.replace(**COMPARED[name]).replace(**ALONE), name)
    # the training loss that is shown is a mean over batches
    same_checkpoint(name, f"{name}-two", history="grad_accum_steps" not in COMPARED[name])


def test_a_mean_over_ranks_in_one_process_is_the_loss():
    logits, target = torch.randn(5, 4, 2), torch.randint(4, (5, 2))
    options = {"weight": [0.5, 1.0, 2.0, 4.0]}
    torch.testing.assert_close(
        mean_over_ranks(create_loss("focal", **options))(logits, target=target),
        create_loss("focal", **options)(logits, target),
    )


@pytest.mark.parametrize(
    ("loss", "error"),
    [
        (lambda: create_loss("focal", reduction="none"), "reduction must be 'mean', got 'none'"),
        (torch.nn.CrossEntropyLoss, "must be a ClassificationLoss, got CrossEntropyLoss"),
    ],
)
def test_what_is_no_mean_of_rows_has_none_over_ranks(loss, error):
    with pytest.raises((TypeError, ValueError), match=error):
        mean_over_ranks(loss())
