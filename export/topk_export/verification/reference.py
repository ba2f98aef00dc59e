"""Definitions that exported heads are compared with: float64, numpy alone, sharing no code with the graph."""

import numpy as np

from topk_export.runtime.metadata import Metadata

NEVER = float(np.finfo(np.float32).max)  # a threshold that no probability reaches; runtimes may fold infinities away


def marginals(logits: np.ndarray, k: int, temperature: float = 1.0) -> np.ndarray:
    """Return the probability that each class is in the top-k set, in float64.

    pi_i = e_i sigma_{k-1}(e without i) / sigma_k(e),  e = exp(logits / temperature)

    Every factor 1 + e_i X is divided by 1 + e_i after a shift of the scores, which turns the coefficients into
    probabilities of a count; the polynomials without i come from prefix and suffix products, so all terms are positive.
    The temperature is rounded to float32 first, as it is in the graph.

    Args:
        logits: scores [batch, n], n > k.
        k: size of the set.
        temperature: divides the scores.
    """
    x = np.asarray(logits, np.float64) / np.float64(np.float32(temperature))
    batch, n = x.shape
    e = np.exp(np.minimum(x - _shift(x, k), 500.0))
    q, p = 1 / (1 + e), e / (1 + e)
    prefix = np.zeros((n + 1, batch, k + 1))
    prefix[0, :, 0] = 1
    for i in range(n):
        prefix[i + 1] = _times(prefix[i], q[:, i], p[:, i])
    suffix, out = prefix[0].copy(), np.empty_like(x)
    for i in reversed(range(n)):
        inside = p[:, i] * (prefix[i, :, :k] * suffix[:, k - 1 :: -1]).sum(-1)
        outside = q[:, i] * (prefix[i] * suffix[:, ::-1]).sum(-1)
        out[:, i] = inside / (inside + outside)
        suffix = _times(suffix, q[:, i], p[:, i])
    return out


def sigmoids(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Return the probability of each class of several labels in float64; the temperature is rounded to float32."""
    x = np.asarray(logits, np.float64) / np.float64(np.float32(temperature))
    small = np.exp(-np.abs(x))
    return np.where(x < 0, small, 1.0) / (1 + small)


def label_thresholds(metadata: Metadata) -> dict[str, np.ndarray]:
    """Return the thresholds of a calibrated file of several labels in float32, by the output that they make."""
    if not metadata.several or metadata.sets is None or metadata.labels is None:
        return {}
    common = metadata.sets["threshold"]  # JSON knows no infinity, the threshold of sets that are always empty
    return {
        "labels": np.asarray(metadata.labels["thresholds"], np.float32),
        "set": np.asarray(NEVER if common is None else common, np.float32),
    }


def _times(c: np.ndarray, q: np.ndarray, p: np.ndarray) -> np.ndarray:
    """c (q + p X), cut after the last coefficient of c [batch, k+1]."""
    product = c * q[:, None]
    product[:, 1:] += c[:, :-1] * p[:, None]
    return product


def _shift(x: np.ndarray, k: int) -> np.ndarray:
    """t [batch, 1] with sum sigmoid(x - t) = k - 1/2, by bisection: the wanted coefficients then lie near the mode."""
    low, high = x.min(-1, keepdims=True) - 50.0, x.max(-1, keepdims=True) + 50.0
    for _ in range(100):
        t = (low + high) / 2
        more = (1 / (1 + np.exp(np.minimum(t - x, 700.0)))).sum(-1, keepdims=True) > k - 0.5
        low, high = np.where(more, t, low), np.where(more, high, t)
    return low
