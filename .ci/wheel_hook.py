"""A build hook of hatchling: a wheel that holds a library of kernels is for one platform, any other one for all."""

import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface):
    """See :mod:`topk_registry.ops.cpu.library`; ``.ci/wheel.py`` puts the library there."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "standard" and any(Path(self.root).glob("topk_registry/ops/cpu/topk_kernels.*")):
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data.update(pure_python=False, tag=f"py3-none-{platform}")
