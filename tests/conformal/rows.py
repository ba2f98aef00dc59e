"""Rows of a made-up model whose labels are known to follow its probabilities, more or less."""

import numpy as np


def model_rows(count: int, n: int = 10, *, seed: int = 0, sharpness: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    """Logits [count, n] and labels [count], drawn from a softmax that is a little less sharp than the model's."""
    rng = np.random.default_rng(seed)
    logits = sharpness * rng.standard_normal((count, n)) * rng.uniform(0.3, 1.5, (count, 1))
    labels = (0.7 * logits + rng.gumbel(size=logits.shape)).argmax(-1)
    return logits, labels


HARD = {
    "ties": np.array([[1.0, 3.0, 3.0, 1.0, 0.0], [2.0, 2.0, 0.0, 2.0, 2.0]]),
    "flat": np.zeros((2, 5)),
    "one dominant class": np.array([[0.0, 90.0, 0.0, 1.0, -5.0], [60.0, -60.0, 0.0, 0.0, 0.0]]),
    "far tail": np.array([[0.0, -120.0, -130.0, -140.0, -150.0]]),
    "two classes": np.array([[0.3, 0.1]]),
}
