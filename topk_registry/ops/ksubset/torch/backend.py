"""The backend of torch operations: it serves every device, precision and k."""

from topk_registry.ops.ksubset.backends import Kernels
from topk_registry.ops.ksubset.torch.all_classes import margins, margins_backward
from topk_registry.ops.ksubset.torch.labels import label_margins

kernels = Kernels(label_margins, margins, margins_backward)
