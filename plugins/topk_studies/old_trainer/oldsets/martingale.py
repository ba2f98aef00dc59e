"""A test of exchangeability that may be looked at after every sample: conformal test martingales.

Each new value gets a conformal p-value, its rank among all values so far with ties broken at random. Under
exchangeability these are independent and uniform, so a gambler who bets on them cannot grow rich: his capital is a
martingale that starts at 1, and by Ville's inequality it ever reaches 1 / level with probability at most ``level``.

The gambler is the mean of two simple jumpers (Vovk et al. 2021), one who bets on p and one who bets on |2 p - 1|. Each
spreads his capital over the bets 1 + e (p - 1/2) with e in {-1, 0, 1}, and moves a share of it between them at every
step, so that he finds a change that comes late.
"""

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable

import numpy as np

BETS = np.array([-1.0, 0.0, 1.0])
JUMP = 0.01  # as in the paper


class ExchangeabilityTest:
    """Says when a stream of values no longer looks like the reference, at a level that holds over all time.

    Args:
        reference: values of samples known to be of the wanted distribution; may be empty, for a test within the stream.
        level: the probability of ever rejecting an exchangeable stream.
        seed: of the random ranks among equal values.

    Example:
        >>> test = ExchangeabilityTest(calibration_scores, level=0.01)
        >>> for score in stream:
        ...     if test.update(score):
        ...         print("the data have changed")
    """

    def __init__(self, reference: Iterable[float] = (), *, level: float = 0.01, seed: int = 0) -> None:
        if not 0 < level < 1:
            raise ValueError(f"level, the probability of a false alarm, must be above 0 and below 1, got {level!r}")
        self.level = level
        self.log_capital: list[float] = []
        self.rejected_at: int | None = None
        self._seen = sorted(map(float, reference))
        if any(map(math.isnan, self._seen)):
            raise ValueError("the reference holds NaN")
        self._rng = np.random.default_rng(seed)
        self._jumpers = [np.full(3, 1 / 6), np.full(3, 1 / 6)]  # two gamblers, each with half of the capital
        self._log_scale = 0.0

    def update(self, value: float) -> bool:
        """Take the next value; whether exchangeability has been rejected by now."""
        p = self._p_value(float(value))
        for i, feature in enumerate((p, abs(2 * p - 1))):
            jumper = self._jumpers[i]
            jumper = (1 - JUMP) * jumper + JUMP * jumper.sum() / 3
            self._jumpers[i] = jumper * (1 + BETS * (feature - 0.5))
        total = float(sum(jumper.sum() for jumper in self._jumpers))
        self._log_scale += math.log(total)  # the capital is kept apart, or months of data would overflow
        self._jumpers = [jumper / total for jumper in self._jumpers]
        self.log_capital.append(self._log_scale)
        if self.rejected_at is None and self._log_scale >= -math.log(self.level):
            self.rejected_at = len(self.log_capital) - 1
        return self.rejected_at is not None

    @property
    def rejected(self) -> bool:
        return self.rejected_at is not None

    def _p_value(self, value: float) -> float:
        if math.isnan(value):
            raise ValueError("a value of the stream is NaN")
        below, upto = bisect_left(self._seen, value), bisect_right(self._seen, value)
        insort(self._seen, value)
        above, equal = len(self._seen) - 1 - upto, upto - below + 1
        return (above + self._rng.random() * equal) / len(self._seen)
