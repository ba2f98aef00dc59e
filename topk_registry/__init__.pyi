"""The public names, for editors and type checkers; ``__init__.py`` imports each of them on first use."""

from . import checks as checks
from . import conformal as conformal
from . import data as data
from . import distributions as distributions
from . import errors as errors
from . import functional as functional
from . import metrics as metrics
from . import testing as testing
from . import train as train
from .distributions import KSubset as KSubset
from .errors import PluginError as PluginError
from .losses.base import ClassificationLoss as ClassificationLoss
from .losses.base import CommonOptions as CommonOptions
from .losses.base import SoftmaxLoss as SoftmaxLoss
from .losses.base import TopKLoss as TopKLoss
from .losses.batch import BatchLoss as BatchLoss
from .losses.ranks import mean_over_ranks as mean_over_ranks
from .nn.classifier import CosineClassifier as CosineClassifier
from .nn.classifier import normalize_classifier as normalize_classifier
from .nn.head import TopKHead as TopKHead
from .nn.head import TopKOutput as TopKOutput
from .nn.linear import LinearSmoothTopK as LinearSmoothTopK
from .nn.perturbed import PerturbedTopK as PerturbedTopK
from .nn.spherical import SphericalLinear as SphericalLinear
from .nn.spherical import SphericalSGD as SphericalSGD
from .ops.backend import use_backend as use_backend
from .ops.ksubset.api import topk_log_odds as topk_log_odds
from .ops.ksubset.api import topk_marginals as topk_marginals
from .ops.masses import LabelMixture as LabelMixture
from .ops.masses import Masses as Masses
from .registry import create_loss as create_loss
from .registry import get_loss_builder as get_loss_builder
from .registry import is_loss as is_loss
from .registry import list_losses as list_losses
from .registry import loss_info as loss_info
from .registry import refresh_plugins as refresh_plugins
from .registry import register_loss as register_loss
from .registry.registry import LossInfo as LossInfo
from .registry.signatures import accepted_context as accepted_context

__version__: str
