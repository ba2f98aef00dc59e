"""Every loss that this distribution registers passes every check of the conformance kit."""

import pytest
import torch

import topk_registry as tr
from topk_registry.testing import check_loss, iter_checks

DISTRIBUTION = "topk-registry"
NAMES = [name for name in tr.list_losses() if DISTRIBUTION in tr.loss_info(name).distribution.split(", ")]


def test_the_losses_are_there():
    assert len(NAMES) >= 17


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_conformance(name):
    check_loss(f"{DISTRIBUTION}:{name}")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", NAMES)
def test_the_gpu_gives_what_the_cpu_gives(name):
    (check,) = (one for one in iter_checks(f"{DISTRIBUTION}:{name}") if one.name == "runs_on_cuda")
    check()
