"""A whole training step in one CUDA graph. A rehearsal captures nothing.

They run apart from the other tests: a capture that fails may leave CUDA in a state in which others fail.
"""

import copy

import pytest
import torch
from torch import nn

from tests.gpu.subjects import NAMES, B, N, batch, built, network, on_a_gpu
from tests.ops.triton_runs import DEVICE
from topk_registry.testing.subject import Subject
from topk_studies.timing.rounds import captured

pytestmark = on_a_gpu


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_step_in_a_graph_trains_as_without(name):
    loss, label = built(name), batch()[1]
    if Subject.of(name, num_classes=N).is_random:
        pytest.skip("draws other numbers in a graph")
    x = torch.randn(B, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    plain = network()
    one = copy.deepcopy(plain)

    def step(net: nn.Module) -> None:
        value = loss(net(x), label)
        with torch.no_grad():
            parameters = list(net.parameters())
            for p, g in zip(parameters, torch.autograd.grad(value, parameters), strict=True):
                p.sub_(g, alpha=0.1)

    before = [p.detach().clone() for p in one.parameters()]
    replay = captured(lambda: step(one))
    with torch.no_grad():
        for p, kept in zip(one.parameters(), before, strict=True):
            p.copy_(kept)  # capturing took steps to warm up
    for _ in range(3):
        replay()
        step(plain)
    # products of matrices may add up in another order under capture: a thousand roundings, three steps
    for p, wanted in zip(one.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, wanted, rtol=3e-4, atol=3e-6)
