"""``topk-registry doctor``: versions, devices, backends, commands and plug-ins, with notes and problems."""

import json
import platform
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path

from topk_registry import registry
from topk_registry.cli import ArgumentParser
from topk_registry.cli.commands import commands
from topk_registry.registry import environment
from topk_registry.registry.discovery import idle_patterns, misspelt_groups
from topk_registry.registry.errors import BrokenPluginError, MissingPackageError, PluginError

REQUIRED = ("torch", "timm")
OPTIONAL = ("torchvision", "triton", "numba", "onnx", "onnxscript", "onnxruntime")


@dataclass
class Report:
    """Facts by name, notes, and problems, which make the exit status 1."""

    facts: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def main(argv: Sequence[str]) -> int:
    """Show versions, GPUs, backends, commands on PATH and broken plug-ins."""
    parser = ArgumentParser(
        prog="topk-registry doctor",
        description="Show versions, GPUs, the backend that serves on each device, the timm command that wins, and "
        "broken plug-ins. Imports the packages it names and every plug-in that is not disabled, which runs their code. "
        "The exit status is 1 if something is wrong.",
    )
    parser.add_argument("--json", action="store_true", help="print the report for programs")
    parser.add_argument(
        "--warm",
        action="store_true",
        help="compile the kernels of every loss for the CPU and keep them, for an image or a cluster, in place of the "
        "report; the exit status is 1 if one cannot be compiled or kept",
    )
    parser.add_argument("--double", action="store_true", help="with --warm: for float64 too, beside float32")
    args = parser.parse_args(argv)
    if args.warm and args.json:
        parser.error("--warm makes no report, so --json cannot print it")
    if args.double and not args.warm:
        parser.error("--double needs --warm")
    if args.warm:
        return import_module("topk_registry.cli.warm").warm(double=args.double)
    report = examine()
    print(json.dumps(asdict(report), indent=2) if args.json else _text(report))
    return 1 if report.problems else 0


def examine() -> Report:
    """Examine everything; no part's failure hides another's finding."""
    report = Report({"python": f"{platform.python_version()} ({sys.executable})", "platform": platform.platform()})
    for name in ("topk-registry", *REQUIRED, *OPTIONAL):
        report.facts[name] = environment.installed_version(name) or "not installed"
    for look in (_predict, _onnxruntime, _imports, _gpu, _backends, _commands, _plugins):
        try:
            look(report)
        except Exception as error:
            report.problems.append(f"looking at {look.__name__[1:]} failed: {type(error).__name__}: {error}")
    report.problems = list(dict.fromkeys(report.problems))
    return report


def _predict(report: Report) -> None:
    """Find the distribution that holds the same modules as this one."""
    if version := environment.installed_version("topk-predict"):
        report.problems.append(
            f"topk-predict {version} and topk-registry install the same files, and removing one breaks the other: "
            "uninstall both, then install the one you want"
        )


def _onnxruntime(report: Report) -> None:
    wheels = environment.wheels_of("onnxruntime")
    report.facts["onnxruntime"] = ", ".join(wheels) or report.facts["onnxruntime"]
    if len(wheels) > 1:
        report.problems.append(
            f"{' and '.join(wheels)} overwrite each other's files: uninstall all of them, then install the one you want"
        )


def _imports(report: Report) -> None:
    for name in (*REQUIRED, *OPTIONAL):
        if report.facts[name] == "not installed":
            if name in REQUIRED:
                report.problems.append(f"{name} is not installed")
            continue
        try:
            import_module(name)
        except Exception as error:
            report.problems.append(f"{name} is installed and fails to import: {type(error).__name__}: {error}")


def _gpu(report: Report) -> None:
    torch = sys.modules.get("torch")
    if torch is None:
        report.facts["gpu"] = "unknown without torch"
        return
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    report.facts["gpu"] = ", ".join(names) or "none that torch can use"
    if runtime := sys.modules.get("onnxruntime"):
        providers = getattr(runtime, "get_available_providers", list)()
        report.facts["onnxruntime providers"] = ", ".join(providers) or "none"


def _backends(report: Report) -> None:
    """Load and try the kernels of each operator, and tell which serve on each device, and why."""
    if "torch" not in sys.modules:
        return
    library = import_module("topk_registry.ops.cpu.library").library()
    report.facts["kernels for the CPU"] = (
        f"compiled by numba: {library.why}" if library.why else f"{library.path}, for {library.level}"
    )
    for record in import_module("topk_registry.ops.backend").report():
        report.facts[f"{record.operator} on {record.device}"] = f"{record.backend}: {record.why}"


def _commands(report: Report) -> None:
    declared = environment.declared_commands("timm")
    if len(declared) > 1:
        report.problems.append(
            f"{' and '.join(sorted(declared.values()))} each install a timm command, and the last installed won; "
            "topk-train and `python -m topk_registry train` are always ours"
        )
    paths = environment.commands_on_path("timm")
    if not paths:
        report.facts["timm command"] = "not on PATH"
        report.notes.append(f"the commands are in {sysconfig.get_path('scripts')}, which is not on PATH")
        return
    module = environment.wrapped_module(paths[0])
    owner = declared.get(module or "", "another environment" if module else "an unknown owner")
    report.facts["timm command"] = f"{paths[0]} of {owner}" + (f" ({module})" if module else "")
    if module != "topk_registry.cli.main":
        report.problems.append(f"the timm command that wins is not ours: {paths[0]}; use topk-train instead")
    elif paths[0].parent.resolve() != Path(sysconfig.get_path("scripts")).resolve():
        report.notes.append(f"the timm command that wins, {paths[0]}, is not the one beside {sys.executable}")


def _plugins(report: Report) -> None:
    groups = (
        registry.losses,
        registry.datasets,
        registry.loggers,
        registry.model_files,
        commands,
        registry.scores,
        registry.score_nodes,
        registry.columns,
    )
    works = {names.kind: 0 for names in groups}
    for names in groups:
        report.problems += names.problems()
        report.notes += [
            f"{names.kind} {plugin.name!r} is {names.info(plugin.name).distribution}'s; the one of {plugin.owner} is "
            f"asked for as {plugin.qualified!r}"
            for plugin in names.shadowed()
        ]
        for info in names.infos():
            if info.status == "disabled" or (info.status == "broken" and info.distribution == "timm"):
                report.notes.append(f"{names.kind} {info.name!r}: {info.error}")
                continue
            try:
                names.builder(info.name)
                works[names.kind] += 1
            except PluginError as error:
                missing = isinstance(error.__cause__, MissingPackageError)
                # these may need an extra that is not installed, and nothing else does
                extra = names not in (registry.losses, registry.datasets, registry.scores)
                extra = extra and isinstance(error, BrokenPluginError)
                optional = missing or (extra and not names.is_misdeclared(info.name))
                told = f"{names.kind} {info.name!r}: {error.__cause__}" if missing else str(error)
                (report.notes if optional else report.problems).append(told)
    report.problems += misspelt_groups([names.group for names in groups])
    report.notes += idle_patterns([plugin for names in groups for plugin in names.plugins()])
    text = (
        "{loss} losses, {dataset} data sets, {logger} loggers, {model file} model files and {command} commands import"
    )
    if works["score"] or works["column"]:  # ours are no plug-ins
        text += "; {score} scores and {column} columns of others, too"
    report.facts["plug-ins"] = text.format(**works)


def _text(report: Report) -> str:
    width = max(map(len, report.facts))
    lines = [f"{name:<{width}}  {value}" for name, value in report.facts.items()]
    for title, messages in (("note", report.notes), ("problem", report.problems)):
        lines += ["", *(f"{title}: {line}" for line in messages)] if messages else []
    return "\n".join(lines if report.problems else [*lines, "", "no problems found"])
