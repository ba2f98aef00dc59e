"""The command ``topk-registry doctor`` prints versions, devices, backends, plug-ins, and problems."""

import platform
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from topk_registry import registry
from topk_registry.cli import ArgumentParser
from topk_registry.cli.commands import commands
from topk_registry.errors import DisabledPluginError, PluginError
from topk_registry.registry.discovery import OURS, installed_version, misspelt_groups

REQUIRED = ("torch", "timm")
SLIM = ("attach", "calibrate", "predict", "serve", "triton", "verify")  # commands that need no PyTorch
OPTIONAL = ("torchvision", "triton", "numba", "onnx", "onnxscript", "onnxruntime")


@dataclass
class Report:
    """What ``doctor`` prints: facts, notes (such as a disabled plug-in) and problems (such as a broken plug-in)."""

    facts: dict[str, str] = field(default_factory=dict)  # such as {"torch": "2.9.0"}
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def main(argv: Sequence[str]) -> int:
    """Check versions, devices and plug-ins of this installation."""
    parser = ArgumentParser(
        prog="topk-registry doctor",
        description="Show versions, GPUs, the backend of each operator, the timm command on PATH, and broken plug-ins. "
        "This command imports all enabled plug-ins, so it runs their code. The exit status is 1 if there is a problem.",
    )
    parser.parse_args(argv)
    report = examine()
    width = max(map(len, report.facts))
    lines = [f"{name:<{width}}  {value}" for name, value in report.facts.items()]
    for kind, messages in (("note", report.notes), ("problem", report.problems)):
        lines += ["", *(f"{kind}: {message}" for message in messages)] if messages else []
    print("\n".join(lines if report.problems else [*lines, "", "no problems found"]))
    return 1 if report.problems else 0


def examine() -> Report:
    """Examine the installation and return the report. If one part raises an error, the error becomes a problem."""
    report = Report({"python": f"{platform.python_version()} ({sys.executable})", "platform": platform.platform()})
    without = [name for name in REQUIRED if find_spec(name) is None]
    looks = (_packages, _devices, _timm_command, _plugins)
    for look in (_packages, _timm_command) if without else looks:
        try:
            look(report)
        except Exception as error:
            report.problems.append(f"{look.__name__[1:]}: {type(error).__name__}: {error}")
    if without:
        report.notes.append(f"without {' and '.join(without)}: only {', '.join(SLIM)} work")
    return report


def _packages(report: Report) -> None:
    for name in ("topk-registry", *REQUIRED, *OPTIONAL, "onnxruntime-gpu"):
        report.facts[name] = installed_version(name) or "not installed"
    if "not installed" not in (report.facts["onnxruntime"], report.facts["onnxruntime-gpu"]):
        report.problems.append("onnxruntime and onnxruntime-gpu overwrite each other: uninstall both, install one")
    for name in (*REQUIRED, *OPTIONAL):
        try:
            import_module(name)
        except Exception as error:
            if report.facts[name] != "not installed":
                report.problems.append(f"{name} cannot be imported: {type(error).__name__}: {error}")


def _devices(report: Report) -> None:
    torch = import_module("torch")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    report.facts["gpu"] = ", ".join(names) or "none that torch can use"
    if runtime := sys.modules.get("onnxruntime"):
        report.facts["onnxruntime providers"] = ", ".join(runtime.get_available_providers())
    for record in import_module("topk_registry.ops.backend").report():
        report.facts[f"{record.operator} on {record.device}"] = f"{record.backend}: {record.why}"


def _timm_command(report: Report) -> None:
    """Report a problem if the program ``timm`` on PATH is not the command ``timm`` that this distribution installs."""
    path = shutil.which("timm")
    if path is None:
        report.facts["timm command"] = "not on PATH"
        return
    imported = re.search(r"^from ([\w.]+) import \w+", Path(path).read_text(errors="ignore"), re.MULTILINE)
    module = imported[1] if imported else "unknown"
    report.facts["timm command"] = f"{path} ({module})"
    if module != "topk_registry.cli.main":
        report.problems.append(f"the timm command on PATH belongs to another package: {path}; use topk-train instead")


def _plugins(report: Report) -> None:
    for names in (registry.losses, registry.datasets, registry.model_files, commands):
        report.problems += names.problems()
        infos = names.infos()
        report.facts[names.group.partition(".")[2]] = f"{len(infos)}"
        report.notes += [f"{i.name} shares its name with another {names.kind}" for i in infos if ":" in i.name]
        for info in infos:
            try:
                names.builder(info.name)
            except PluginError as error:
                cause, package = error.__cause__, re.split("[.:]", info.value)[0]
                missing = isinstance(cause, ModuleNotFoundError) and str(cause.name).split(".")[0] != package
                noted = isinstance(error, DisabledPluginError) or (missing and info.distribution == OURS)
                hint = "; `pip check` lists missing packages" if missing and not noted else ""
                (report.notes if noted else report.problems).append(f"{error}{hint}")
    report.problems += [message for message, _ in misspelt_groups()]
