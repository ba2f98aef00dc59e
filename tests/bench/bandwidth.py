"""The floor under any time: bytes that must move, over how fast this device moves bytes in this very run."""

import torch

from topk_studies.timing.contest import Case
from topk_studies.timing.rounds import CPU, CUDA, Sample, Spread, interleave

BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}  # far beyond what caches hold


def copy_bandwidth(device: str, *, repeats: int = 9) -> float:
    """Bytes read and written in a second, by the fastest of a few copies from one large tensor to another."""
    kind = torch.device(device).type
    source = torch.ones(BYTES[kind] // 4, device=device)
    target = torch.zeros_like(source)
    clock = CUDA if kind == "cuda" else CPU

    def copy() -> Sample:
        start = clock.mark()
        target.copy_(source)
        return clock.seconds(start, clock.mark()), 0.0

    samples: dict[str, list[Sample]] = {"copy": []}
    interleave({"copy": copy}, samples, repeats=repeats, limit=5.0)
    return 2 * source.nbytes / Spread.of([seconds for seconds, _ in samples["copy"]]).minimum


def floor_seconds(case: Case, bandwidth: float) -> float:
    """To read the logits once and to write their gradient once, which every loss must."""
    return 2 * case.B * case.n * case.dtype.itemsize / bandwidth
