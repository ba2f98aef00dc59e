"""Numbers of the papers that could be checked, with where they were checked.

A number that could not be read in a source that can be named is not here; the reports say in which table it stands.
"""

# de Brebisson, Vincent 2016, accuracy in percent: 100 less the errors on CIFAR-10 and CIFAR-100 that F. Sobolevsky's
# summary of the paper (2025) quotes, 8.52, 8.07, 8.37 and 32.4, 33.1, 33.1
SPHERICAL: dict[tuple[int, str], float] = {
    (10, "ce"): 91.48,
    (10, "log_taylor_softmax"): 91.93,
    (10, "log_spherical_softmax"): 91.63,
    (100, "ce"): 67.6,
    (100, "log_taylor_softmax"): 66.9,
    (100, "log_spherical_softmax"): 66.9,
}
