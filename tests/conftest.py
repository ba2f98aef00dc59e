"""Fixtures that many packages of tests share: torch's number of threads, and temporary distributions with plug-ins."""

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from tests import WORKERS, needs, webgpu, workers
from topk_registry import refresh_plugins
from topk_registry.cli.commands import commands
from topk_registry.registry import losses, timm_losses
from topk_registry.registry.registry import Registry


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(workers.Plugin())


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """``made_once(name, make)``: a copy of the folder that ``make(folder)`` filled, once for all workers."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if WORKERS > 1 else shared

    def copy(name: str, make: Callable[[Path], object]) -> Path:
        original = shared / f"shared-{name}"
        with FileLock(f"{original}.lock"):
            if not original.exists():
                building = tmp_path_factory.mktemp("building")
                make(building)
                building.rename(original)
        return Path(shutil.copytree(original, tmp_path_factory.mktemp(name), dirs_exist_ok=True))

    return copy


@pytest.fixture(scope="session")
def software_gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A WebGPU device that a library computes on the CPU, for this process and the processes that it starts."""
    if missing := webgpu.missing():
        needs.lack(missing, installed_in_ci=webgpu.in_ci())
    with pytest.MonkeyPatch.context() as patch:
        for name, value in webgpu.environment(tmp_path_factory.mktemp("vulkan")).items():
            patch.setenv(name, value)
        yield


@pytest.fixture
def threads() -> Iterator[None]:
    """For a test that sets the number itself: afterwards it is what it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_thread(threads: None) -> None:
    torch.set_num_threads(1)


class Site:
    """A folder that stands for site-packages."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def module(self, name: str, source: str) -> None:
        path = self.root.joinpath(*name.split("."))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".py").write_text(source)

    def distribution(
        self, name: str, losses: Mapping[str, str], *, version: str = "1.0", group: str = "topk_registry.losses"
    ) -> Path:
        info = self.root / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = "\n".join(f"{loss} = {value}" for loss, value in losses.items())
        (info / "entry_points.txt").write_text(f"[{group}]\n{lines}\n")
        return info


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.delenv("TOPK_REGISTRY_PLUGINS", raising=False)
    monkeypatch.delenv("TOPK_REGISTRY_DISABLE", raising=False)
    before = set(sys.modules)
    folder = Site(tmp_path / "site")
    monkeypatch.syspath_prepend(folder.root)
    monkeypatch.setattr(losses, "_registered", {})
    yield folder
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder.root)):
            del sys.modules[name]
    monkeypatch.undo()
    refresh_plugins()
    commands.refresh()


@pytest.fixture
def registry(site: Site) -> Registry:
    """A registry of its own over the losses' group, read after the test's distributions were written."""
    reserved = {name: plugin for name, plugin in timm_losses.reserved().items() if name in ("ce", "bce")}
    return Registry("topk_registry.losses", "loss", reserved=reserved)
