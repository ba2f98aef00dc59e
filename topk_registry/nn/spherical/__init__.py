"""A linear classifier with a loss. The time of a training step does not depend on the number of classes."""

from topk_registry.nn.spherical.factors import SingularStepError
from topk_registry.nn.spherical.layer import SphericalLinear, SphericalSGD

__all__ = ["SingularStepError", "SphericalLinear", "SphericalSGD"]
