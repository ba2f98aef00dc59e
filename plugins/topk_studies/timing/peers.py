"""Contestants that stand beside more than one operator."""

import contextlib
import io
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType

import torch
import torch.nn.functional as F

import topk_registry as tr
from topk_studies.timing.contest import CROSS_ENTROPY, OURS, Case, Contestant, Loss, UnavailableError


def ours(loss: str, *, name: str = OURS, **options: object) -> Contestant:
    """The registered loss, with k and the case's options."""
    return Contestant(name, lambda case: tr.create_loss(loss, k=case.k, **case.loss_options, **options).to(case.device))


SHAPES = 256  # that one run may compile a loss for
BACKENDS = {"torch": ("cpu", "cuda"), "numba": ("cpu",), "triton": ("cuda",)}  # and the devices each is for


def by_backend(build: Callable[[Case, str], Loss]) -> list[Contestant]:
    """Ours by each implementation, where ``auto`` may have chosen another."""

    def one(impl: str, devices: tuple[str, ...]) -> Contestant:
        def choose(case: Case) -> Loss:
            if torch.device(case.device).type not in devices:
                raise UnavailableError(f"for {' and '.join(devices)} only")
            return build(case, impl)

        return Contestant(f"{OURS}: {impl}", choose)

    return [one(impl, devices) for impl, devices in BACKENDS.items()]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Some peers print while they are imported or built; the table is not theirs to write to."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def needs(module: str, install: str) -> ModuleType:
    try:
        with quiet():
            return import_module(module)
    except ImportError as error:
        raise UnavailableError(f"cannot import {module} ({error}); try: pip install {install}") from None


def pytopk_balanced(case: Case) -> Loss:
    epsilon, draws = case.options.get("epsilon", 1.0), int(case.options.get("num_samples", 5))
    return needs("pytopk", "pytopk").BalNoisedTopK(k=case.k, epsilon=epsilon, n_sample=draws).to(case.device)


def difftopk_neuralsort(case: Case) -> Loss:
    """NeuralSort over the 16 or 2k + 2 largest scores; every rank up to k counts the same."""
    difftopk = needs("difftopk", "difftopk")
    return difftopk.TopKCrossEntropyLoss(
        "neuralsort",
        inverse_temperature=1 / case.options.get("tau", 1.0),
        p_k=[1 / case.k] * case.k,
        n=case.n,
        m=min(max(16, 2 * case.k + 2), case.n - 1),
        device=case.device,
    )


def difftopk_smooth(case: Case) -> Loss:
    """The authors' code of the smooth top-k SVM, as difftopk distributes it."""
    loss = needs("difftopk.smooth_topk", "difftopk").SmoothHardTopKLoss
    return loss(case.n, case.k, tau=case.options["tau"], device=case.device)


def compiled(loss: Loss) -> Loss:
    """The loss by ``torch.compile``, for one shape at a time."""
    from torch._dynamo import config

    config.recompile_limit = SHAPES  # after eight by default it runs a function as it is, without a word
    return torch.compile(loss, dynamic=False)


def on_gpu(case: Case) -> bool:
    return case.device.startswith("cuda")


REFERENCE = Contestant(CROSS_ENTROPY, lambda case: F.cross_entropy)
COMPILED = Contestant(f"{CROSS_ENTROPY}, compiled", lambda case: compiled(F.cross_entropy), on_gpu)
