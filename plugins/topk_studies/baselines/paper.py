"""Numbers of the papers that could be checked, with where they stand.

A number that could not be read in a source that can be named is not here; the reports say in which table it stands.
Their data and networks are not those of the small budget: signs can be compared, sizes cannot.
"""

Numbers = dict[tuple[float, str], float]  # (the row's key, the loss) -> percent


def _columns(keys: tuple[float, ...], **losses: tuple[float, ...]) -> Numbers:
    return {(key, loss): value for loss, values in losses.items() for key, value in zip(keys, values, strict=True)}


# Berrada et al. 2018, Table 1 (and 9): CIFAR-100, DenseNet 40-40, 300 epochs, tau = 1, three seeds
_LEVELS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
NOISE: dict[str, Numbers] = {
    "top1": _columns(
        _LEVELS,
        ce=(76.68, 68.20, 61.18, 52.50, 35.53, 14.06),
        smooth_topk_svm=(69.33, 71.30, 70.02, 67.97, 55.85, 15.28),
    ),
    "top5": _columns(
        _LEVELS,
        ce=(94.34, 87.89, 83.04, 79.59, 74.80, 67.70),
        smooth_topk_svm=(94.29, 90.59, 87.39, 83.86, 79.32, 72.93),
    ),
}

# Berrada et al. 2018, Table 2: top-5 on subsets of ImageNet, ResNet-18, tau = 0.1, ten crops
SUBSETS: Numbers = _columns(
    (1.0, 0.5, 0.25, 0.1, 0.05),
    ce=(90.67, 87.57, 82.62, 71.06, 58.31),
    smooth_topk_svm=(90.61, 87.87, 83.38, 73.10, 60.44),
)

# Berrada et al. 2018, Table 6: testing accuracy on CIFAR-100 by temperature
TEMPERATURE: Numbers = _columns(
    (0.0, 1e-3, 0.01, 0.1, 1.0, 10.0, 100.0), smooth_topk_svm=(10.38, 18.19, 91.35, 91.70, 91.52, 90.92, 90.46)
)

# Berrada et al. 2018, Table 8: top-5 on ImageNet's validation images, one crop, (k, tau) = (5, 0.1), by alpha
MARGIN = {0.0: 89.12, 1.0: 89.45}

# Garcin et al. 2022, Table 3: top-5 on CIFAR-100 by the number of draws B
DRAWS = {1: 94.28, 2: 94.2, 3: 94.46, 5: 94.52, 10: 94.24, 50: 94.64, 100: 94.52}

# de Brebisson, Vincent 2016, accuracy in percent: 100 less the errors on CIFAR-10 and CIFAR-100 that F. Sobolevsky's
# summary of the paper (2025) quotes, 8.52, 8.07, 8.37 and 32.4, 33.1, 33.1
SPHERICAL: Numbers = {
    (10, "ce"): 91.48,
    (10, "log_taylor_softmax"): 91.93,
    (10, "log_spherical_softmax"): 91.63,
    (100, "ce"): 67.6,
    (100, "log_taylor_softmax"): 66.9,
    (100, "log_spherical_softmax"): 66.9,
}


def gap(numbers: Numbers, key: float, better: str, worse: str) -> float | None:
    """The paper's difference of two losses under a key, in points; None where it has not both."""
    return less(numbers.get((key, better)), numbers.get((key, worse)))


def less(first: float | None, second: float | None) -> float | None:
    """The first less the second; None where either is."""
    return None if first is None or second is None else first - second
