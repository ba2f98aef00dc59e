"""Every loss that this distribution registers passes every check of the conformance kit."""

from importlib.util import find_spec

import pytest

import topk_registry as tr
from topk_registry.testing import check_loss

DISTRIBUTION = "topk-registry"
NAMES = [name for name in tr.list_losses() if DISTRIBUTION in tr.loss_info(name).distribution.split(", ")]


def test_the_losses_are_there():
    assert len(NAMES) >= 17


@pytest.mark.parametrize("name", NAMES)
def test_conformance(name):
    if not find_spec(tr.loss_info(f"{DISTRIBUTION}:{name}").value.partition(":")[0]):
        pytest.skip("its module is still to come")
    check_loss(f"{DISTRIBUTION}:{name}")
