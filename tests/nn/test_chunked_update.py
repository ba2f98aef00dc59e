"""A layer updated a chunk of classes at a time: torch's own step, in several precisions, without a whole gradient."""

import copy
import gc
import math
import weakref

import pytest
import torch
from timm.scheduler import create_scheduler_v2
from torch import nn
from torch.optim import SGD, Adam, AdamW

from topk_registry import ChunkedUpdate, LabelMixture, LinearSmoothTopK
from topk_registry.nn.chunked_update import states
from topk_registry.ops.backend import use_backend
from topk_registry.ops.update.definition import RandomBits
from topk_studies.timing.memory import peak_bytes

D, N, B = 20, 150, 12
DOUBLE = torch.float64
OPTIMIZERS = {
    "sgd": lambda p, **o: SGD(p, **{"lr": 0.5, "weight_decay": 0.01, **o}),
    "momentum": lambda p, **o: SGD(p, **{"lr": 0.5, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01, **o}),
    "nesterov": lambda p, **o: SGD(p, **{"lr": 0.5, "momentum": 0.9, "nesterov": True, **o}),
    "adam": lambda p, **o: Adam(p, **{"lr": 0.02, "weight_decay": 0.01, **o}),
    "adamw": lambda p, **o: AdamW(p, **{"lr": 0.02, "weight_decay": 0.1, **o}),
}  # fmt: skip


@pytest.fixture(params=["auto", "torch"])
def served(request):
    """Rounding by a compiled kernel where there is one, and by torch operations."""
    with use_backend(request.param):
        yield


def layer(dtype=torch.float32, **options):
    torch.manual_seed(0)
    weights = nn.Linear(D, N, dtype=DOUBLE).state_dict()
    head = LinearSmoothTopK(D, N, **{"k": 3, "tau": 0.5, "chunk": 64, **options}).to(dtype)
    head.load_state_dict(weights, strict=False)
    return head


def batch(step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(step)
    features = torch.randn(B, D, generator=generator, dtype=DOUBLE)
    return features.to(dtype).requires_grad_(), torch.randint(N, (B,), generator=generator)


def grouped(head):
    """Weight and bias in groups of their own, as timm makes them."""
    return [{"params": [head.bias], "weight_decay": 0.0}, {"params": [head.weight], "lr": 0.03}]


def train(name, *, steps=6, dtype=torch.float32, passes=1, update=None, each=lambda *_: None, **options):
    """A trained layer, its optimizer and the gradients of features; with a ChunkedUpdate of the options ``update``."""
    head = layer(dtype, **options)
    optimizer = OPTIMIZERS[name](grouped(head))
    chunked = None if update is None else ChunkedUpdate(optimizer, head, **update)
    gradients = []
    for step in range(steps):
        optimizer.zero_grad()
        for one in range(passes):
            features, target = batch(step * passes + one, dtype)
            head(features, target).backward()
            gradients.append(features.grad)
        each(head, optimizer, chunked)
        assert chunked is None or head.weight.grad is head.bias.grad is None
        optimizer.step()
    return head, optimizer, gradients


def error(found, truth):
    """The largest difference of parameters, gradients and states from those in double precision."""
    pairs = [*zip(found[0].parameters(), truth[0].parameters(), strict=True), *zip(found[2], truth[2], strict=True)]
    kept = [run[1].state_dict()["state"] for run in (found, truth)]
    assert kept[0].keys() == kept[1].keys()
    for place, state in kept[0].items():
        assert state.keys() == kept[1][place].keys()
        pairs += [(value, kept[1][place][name]) for name, value in state.items()]
    return max(float((a.detach().double() - b.detach().double()).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("when", ["backward", "step"])
def test_the_step_is_that_of_torch(name, when):
    truth = train(name, dtype=DOUBLE)
    assert error(train(name, dtype=DOUBLE, update={"when": when}), truth) < 1e-13
    # torch's own step in single precision is off by as much; another order of sums may double that
    assert error(train(name, update={"when": when}), truth) <= 2 * error(train(name), truth)


@pytest.mark.parametrize("name", ["momentum", "adamw"])
@pytest.mark.parametrize(
    "options",
    [{}, {"chunk": None}, {"chunk": 7}, {"bias": False}, {"label_smoothing": 0.1}, {"k": 1, "tau": 1.0, "alpha": 0.0}],
)
def test_chunks_targets_and_cross_entropy(name, options):
    head = layer(DOUBLE, **options)
    optimizer = OPTIMIZERS[name](head.parameters())
    chunked, own = copy.deepcopy(head), None
    own = OPTIMIZERS[name](chunked.parameters())
    ChunkedUpdate(own, chunked)
    for step in range(4):
        features, target = batch(step, DOUBLE)
        target = LabelMixture.mixed(target, target.flip(0), 0.7) if step == 2 else target
        target = torch.where(torch.arange(B) % 3 == 0, -100, target) if step == 3 else target
        losses = [each(features, target) for each in (head, chunked)]
        torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
        for each, loss in zip((optimizer, own), losses, strict=True):
            loss.backward()
            each.step()
            each.zero_grad()
    for a, b in zip(head.parameters(), chunked.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_passes_add_up_and_norms_are_clipped():
    norms = []

    def clip(head, optimizer, chunked):
        parameters = list(head.parameters())
        if chunked is None:
            norms.append(torch.nn.utils.clip_grad_norm_(parameters, 0.05))
        else:
            norms.append(chunked.clip_grad_norm_(parameters, 0.05))

    truth = train("adamw", dtype=DOUBLE, passes=3, each=clip)
    found = train("adamw", dtype=DOUBLE, passes=3, each=clip, update={"when": "step"})
    assert error(found, truth) < 1e-13
    torch.testing.assert_close(norms[6:], norms[:6], rtol=1e-10, atol=0)
    assert min(norms) > 0.05


def test_other_parameters_count_in_the_norm():
    def run(chunked):
        torch.manual_seed(1)
        head, backbone = layer(DOUBLE), nn.Linear(D, D, dtype=DOUBLE)
        parameters = [*backbone.parameters(), *head.parameters()]
        optimizer = SGD(parameters, lr=1.0)
        update = ChunkedUpdate(optimizer, head, when="step") if chunked else None
        for step in range(3):
            optimizer.zero_grad()
            features, target = batch(step, DOUBLE)
            head(backbone(features), target).backward()
            (torch.nn.utils.clip_grad_norm_ if update is None else update.clip_grad_norm_)(parameters, 0.01)
            optimizer.step()
        return parameters

    for a, b in zip(run(False), run(True), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_a_gradient_scaler_skips_what_overflows_in_the_layer_alone():
    def run(chunked, overflow=()):
        head = layer(DOUBLE)
        backbone = nn.Linear(D, D, dtype=DOUBLE)
        with torch.no_grad():
            backbone.weight.copy_(torch.eye(D))
        optimizer = AdamW([*backbone.parameters(), *head.parameters()], lr=0.02)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        update = ChunkedUpdate(optimizer, head, when="step", scaler=scaler) if chunked else None
        weights = []
        for step in range(4):
            optimizer.zero_grad()
            features, target = batch(step, DOUBLE)
            scaler.scale(head(backbone(features), target)).backward()
            if step in overflow:
                factor = torch.tensor(math.inf)
                update.scale_gradients(factor) if update else head.weight.grad.mul_(factor)
                if update:  # as the backward pass does, where the product of scores' gradient and features overflows
                    backbone.weight.grad += math.inf
            scaler.step(optimizer)
            scaler.update()
            weights.append(head.weight.detach().clone())
        return weights, scaler.get_scale()

    for overflow in ((), (1,)):
        (plain, scale), (found, own) = run(False, overflow), run(True, overflow)
        assert scale == own == 2.0 ** (10 - len(overflow))
        assert torch.equal(found[0], found[1]) == bool(overflow)
        torch.testing.assert_close(found, plain, rtol=0, atol=1e-13)


def test_an_overflow_of_the_layers_gradient_shows_in_the_features():
    """In float16: each product with the weight is finite, and a sum of the features times the gradient is not."""
    head = LinearSmoothTopK(4, 40, k=1, tau=1.0, alpha=0.0, bias=False)
    nn.init.zeros_(head.weight)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    ChunkedUpdate(SGD(head.parameters(), lr=0.1), head, when="step", scaler=scaler)
    for size, finite in ((1.0, True), (3000.0, False)):
        features = torch.full((8, 4), size, requires_grad=True)
        with torch.autocast("cpu", torch.float16):
            loss = head(features, torch.zeros(8, dtype=torch.int64))
        scaler.scale(loss).backward()
        assert bool(features.grad.isfinite().all()) == finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state", states.KINDS)
@pytest.mark.parametrize("name", ["momentum", "adamw"])
@pytest.mark.usefixtures("served")
def test_low_precision_is_the_wide_step_rounded_to_a_neighbour(name, state, dtype):
    """From the same stored numbers torch's step in float32 gives numbers, of which a neighbour is stored."""
    head = layer(bias=False)
    head.weight = nn.Parameter(head.weight.detach().to(dtype))
    optimizer = OPTIMIZERS[name]([head.weight])
    ChunkedUpdate(optimizer, head, state=state)
    wide = layer(bias=False)
    for step in range(5):
        kept, names = (
            optimizer.state[head.weight],
            ("momentum_buffer",) if name == "momentum" else ("exp_avg", "exp_avg_sq"),
        )
        plain = OPTIMIZERS[name]([wide.weight])
        with torch.no_grad():
            wide.weight.copy_(head.weight)
        if step:
            saved = states.converted(dict(kept), names, wide.weight, "float32")
            plain.state[wide.weight] = {key: copy.deepcopy(value) for key, value in saved.items() if key != "updates"}
        features, target = batch(step)
        for each in (wide, head):
            each(features, target).backward()
        plain.step()
        plain.zero_grad()
        optimizer.step()
        found = states.converted(dict(kept), names, wide.weight, "float32")
        for each in names:
            exact = plain.state[wide.weight][each]
            near = {"float32": 1e-6, "bfloat16": 2.0**-7, "int8": 2.0**-3}[state]
            smallest = exact.abs().amax(1, keepdim=True) * {"float32": 1e-7, "bfloat16": 1e-7, "int8": 2.0**-15}[state]
            assert ((found[each] - exact).abs() <= near * exact.abs() + smallest).all(), each
        near = 1e-6 if dtype == torch.float32 else 2.0**-7
        assert ((head.weight.float() - wide.weight).abs() <= near * wide.weight.abs() + 1e-7).all()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("loaded", [False, True])
def test_each_update_has_random_bits_of_its_own(name, loaded, monkeypatch):
    updates, begin = [], RandomBits.begin
    monkeypatch.setattr(RandomBits, "begin", lambda self, *stream: (updates.append(stream), begin(self, *stream)))
    head = layer()
    head.weight = nn.Parameter(head.weight.detach().to(torch.bfloat16))
    optimizer = OPTIMIZERS[name](grouped(head))
    ChunkedUpdate(optimizer, head, state="bfloat16")
    if loaded:
        optimizer.load_state_dict(train(name)[1].state_dict())
    for step in range(4):
        features, target = batch(step)
        head(features, target).backward()
        optimizer.step()
    assert len(set(updates)) == 4


@pytest.mark.parametrize("state", states.KINDS)
@pytest.mark.usefixtures("served")
def test_repeated_rounding_of_whole_updates_is_unbiased(state):
    """Over 100 seeds the mean of the weight in bfloat16 after a step is the step's, within 5.5 standard errors."""
    reference = layer(bias=False)
    features, target = batch(0)
    found = []
    for seed in range(100):
        head = layer(bias=False, chunk=None)
        head.weight = nn.Parameter(head.weight.detach().to(torch.bfloat16))
        optimizer = AdamW([head.weight], lr=0.02, weight_decay=0.1)
        ChunkedUpdate(optimizer, head, state=state, seed=seed)
        head(features, target).backward()
        found.append(head.weight.detach().double())
    with torch.no_grad():
        reference.weight.copy_(layer(bias=False).weight.to(torch.bfloat16))
    optimizer = AdamW([reference.weight], lr=0.02, weight_decay=0.1)
    reference(features, target).backward()
    optimizer.step()
    found = torch.stack(found)
    # numbers far smaller than their neighbours' distance are seen too seldom for the law of large numbers
    spread = found.std(0) / 10 + 1e-3 * reference.weight.abs()
    assert ((found.mean(0) - reference.weight.double()).abs() <= 5.5 * spread + 1e-6).all()


def test_schedules_reach_the_layer():
    def run(update):
        head = layer(DOUBLE)
        optimizer = OPTIMIZERS["adamw"](head.parameters())
        if update:
            ChunkedUpdate(optimizer, head)
        scheduler, _ = create_scheduler_v2(
            optimizer,
            "cosine",
            num_epochs=4,
            warmup_epochs=1,
            warmup_lr=1e-4,
            step_on_epochs=False,
            updates_per_epoch=2,
        )
        rates = []
        for step in range(8):
            scheduler.step_update(step)
            rates.append(optimizer.param_groups[0]["lr"])
            features, target = batch(step, DOUBLE)
            head(features, target).backward()
            optimizer.step()
            optimizer.zero_grad()
        return head.weight, rates

    (plain, rates), (found, own) = run(False), run(True)
    assert rates == own
    assert len(set(rates)) > 5
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["sgd", "nesterov", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state", states.KINDS)
@pytest.mark.usefixtures("served")
def test_a_saved_state_goes_on_bit_for_bit(name, state, dtype, tmp_path):
    def begin():
        head = layer()
        head.weight = nn.Parameter(head.weight.detach().to(dtype))
        optimizer = OPTIMIZERS[name](head.parameters())
        ChunkedUpdate(optimizer, head, state=state)
        return head, optimizer

    def go(head, optimizer, steps):
        for step in steps:
            features, target = batch(step)
            head(features, target).backward()
            optimizer.step()
            optimizer.zero_grad()

    whole = begin()
    go(*whole, range(6))
    first = begin()
    go(*first, range(3))
    torch.save([each.state_dict() for each in first], tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt")
    then = begin()
    for each, part in zip(then, saved, strict=True):
        each.load_state_dict(part)
    go(*then, range(3, 6))
    assert torch.equal(whole[0].weight, then[0].weight)
    assert torch.equal(whole[0].bias, then[0].bias)
    for place, kept in whole[1].state_dict()["state"].items():
        found = then[1].state_dict()["state"][place]
        assert kept.keys() == found.keys()
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(found[key])) for key, a in kept.items())
        assert all(a.dtype == found[key].dtype for key, a in kept.items() if isinstance(a, torch.Tensor))


@pytest.mark.parametrize("state", states.KINDS)
@pytest.mark.parametrize("name", ["nesterov", "adamw"])
def test_states_load_with_an_update_and_without(name, state):
    near = {"float32": 0.0, "bfloat16": 2.0**-8, "int8": 2.0**-4}[state]
    plain, chunked = train(name), train(name, update={"state": state})
    optimizer = OPTIMIZERS[name](grouped(layer()))
    optimizer.register_load_state_dict_pre_hook(ChunkedUpdate.expand_states)
    optimizer.load_state_dict(chunked[1].state_dict())
    weight = optimizer.param_groups[1]["params"][0]
    kept = optimizer.state[weight]
    assert all(value.dtype == torch.float32 for key, value in kept.items() if key != "updates")
    optimizer.step()

    head = layer()
    optimizer = OPTIMIZERS[name](grouped(head))
    ChunkedUpdate(optimizer, head, state=state)
    optimizer.load_state_dict(plain[1].state_dict())
    for key, value in plain[1].state[plain[0].weight].items():
        found = (
            states.converted(dict(optimizer.state[head.weight]), (key,), head.weight, "float32")
            if key != "step"
            else optimizer.state[head.weight]
        )
        smallest = 2.0**-15 * (value.abs().amax(1, True) if value.ndim else 0)
        assert ((found[key] - value).abs() <= near * value.abs() + (smallest if state == "int8" else 0)).all()

    head = layer()
    optimizer = OPTIMIZERS["adamw" if name != "adamw" else "nesterov"](grouped(head))
    ChunkedUpdate(optimizer, head, state=state)
    with pytest.raises(ValueError, match="no exp_avg, exp_avg_sq" if name != "adamw" else "no momentum_buffer"):
        optimizer.load_state_dict(chunked[1].state_dict())


def test_an_update_begins_and_ends_in_the_middle():
    """Switched on after two steps and off after two more, in float32: the run without it."""
    truth = train("adamw", dtype=DOUBLE)
    made = []

    def switch(head, optimizer, _):
        made.append(None)
        if len(made) == 2:
            # this step's gradients are there already: the update takes those of the next one
            optimizer.step()
            optimizer.zero_grad()
            made[-1] = ChunkedUpdate(optimizer, head, when="step")
        elif len(made) == 4:
            optimizer.step()
            made[1].remove()

    assert error(train("adamw", dtype=DOUBLE, each=switch), truth) < 1e-13


def test_what_cannot_be_right_is_refused():
    head = layer()
    optimizer = AdamW(head.parameters())
    with pytest.raises(ValueError, match=r"state must be one of float32, bfloat16, int8, got 'fp8'"):
        ChunkedUpdate(optimizer, head, state="fp8")
    with pytest.raises(ValueError, match=r"when='step'.*before any weight"):
        ChunkedUpdate(optimizer, head, scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match=r"must have the layer's weight"):
        ChunkedUpdate(AdamW([head.bias]), head)
    with pytest.raises(TypeError, match=r"SGD, Adam and AdamW, got torch.optim.rmsprop.RMSprop"):
        ChunkedUpdate(torch.optim.RMSprop(head.parameters()), head)
    with pytest.raises(ValueError, match=r"AdamW with amsgrad=True"):
        ChunkedUpdate(AdamW(head.parameters(), amsgrad=True), head)
    with pytest.raises(TypeError, match="expected a linear layer"):
        ChunkedUpdate(optimizer, nn.ReLU())
    update = ChunkedUpdate(optimizer, head)
    with pytest.raises(ValueError, match="has a ChunkedUpdate already"):
        ChunkedUpdate(optimizer, head)
    features, target = batch(0)
    loss, other = head(features, target), head(features, target)
    loss.backward()
    before = head.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"second backward pass before optimizer.step\(\).*when='step'"):
        other.backward()
    with pytest.raises(RuntimeError, match=r"norm of a gradient .*when='step'"):
        update.clip_grad_norm_(head.parameters(), 1.0)
    assert torch.equal(head.weight, before)
    optimizer.step()
    (head.weight.square().sum()).backward()
    with pytest.raises(RuntimeError, match="gradient from elsewhere"):
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="without a closure"):
        optimizer.step(lambda: 0.0)
    head.sample = 0.5
    with pytest.raises(ValueError, match="sample cannot be combined"):
        head(features, target)
    head.sample = None
    with torch.autocast("cpu", torch.float16), pytest.raises(RuntimeError, match="gradient scaler"):
        head(features, target).backward()


def test_a_dropped_gradient_changes_nothing():
    head = layer()
    optimizer = SGD(head.parameters(), lr=1.0)
    ChunkedUpdate(optimizer, head, when="step")
    before = head.weight.detach().clone()
    features, target = batch(0)
    head(features, target).backward()
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(head.weight, before)
    with torch.no_grad():
        head(features, target)


def test_a_bfloat16_weight_beside_float32_features_and_under_autocast():
    features, target = batch(0)
    for dtype, context in (
        (torch.bfloat16, torch.autocast("cpu", enabled=False)),
        (torch.float32, torch.autocast("cpu", torch.bfloat16)),
    ):
        head = layer()
        head.weight = nn.Parameter(head.weight.detach().to(dtype))
        optimizer = SGD(head.parameters(), lr=0.1)
        ChunkedUpdate(optimizer, head, state="bfloat16")
        wide = layer()
        with context:
            loss = head(features, target)
            loss.backward()
            torch.testing.assert_close(loss, wide(features, target), rtol=0.02, atol=0.02)
            assert head.topk(features).indices.shape == (B, 3)


def test_nothing_stays_behind():
    head = layer()
    optimizer = AdamW(head.parameters())
    update = weakref.ref(ChunkedUpdate(optimizer, head))
    copied = copy.deepcopy(head)
    assert getattr(copied.weight, "_chunked_update", None) is None  # a moving average trains by itself
    del head, optimizer
    gc.collect()
    assert update() is None


def test_memory_of_a_step_is_that_of_a_chunk():
    n, d, rows = 40_000, 64, 32
    head = LinearSmoothTopK(d, n, chunk=1024)
    optimizer = SGD(head.parameters(), lr=0.1, momentum=0.9)
    chunked = copy.deepcopy(head)
    own = SGD(chunked.parameters(), lr=0.1, momentum=0.9)
    ChunkedUpdate(own, chunked)
    features, target = torch.randn(rows, d, requires_grad=True), torch.randint(n, (rows,))

    def step(head, optimizer):
        head(features, target).backward()
        optimizer.step()
        optimizer.zero_grad()

    for each in ((head, optimizer), (chunked, own)):
        step(*each)  # makes the states
    whole, part = (peak_bytes(lambda each=each: step(*each), "cpu") for each in ((head, optimizer), (chunked, own)))
    assert whole >= 4 * n * d
    assert part < 4 * n * d / 4
