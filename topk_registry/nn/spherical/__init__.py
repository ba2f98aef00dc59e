"""The output layer of the spherical losses, trained exactly at a cost that does not depend on the number of classes."""

from topk_registry.nn.spherical.layer import SphericalLinear
from topk_registry.nn.spherical.optimizer import SphericalSGD

__all__ = ["SphericalLinear", "SphericalSGD"]
