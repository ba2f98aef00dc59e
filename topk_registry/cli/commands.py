"""Commands by name.

A command is an entry point that an installed distribution declares in its own ``pyproject.toml``:

    [project.entry-points."topk_registry.commands"]
    their-command = "their_package.their_module:main"

``main(argv: Sequence[str]) -> int`` takes the arguments after the command's name and returns the exit status. The first
line of its docstring, read from the source file, is its line in ``topk-registry --help``; its module is imported when
the command runs. Owners, clashes of names and ``TOPK_REGISTRY_DISABLE`` follow the rules of losses.
"""

from topk_registry.registry.discovery import Plugin
from topk_registry.registry.environment import installed_version
from topk_registry.registry.registry import Registry

DISTRIBUTION = "topk-registry"

# The core's own commands serve wherever the package is importable: no plug-in can take their names, and an allow list
# of plug-ins does not disable them. The order is that of --help.
CORE = {
    "train": "topk_registry.train.command:main",
    "validate": "topk_registry.train.validate:main",
    "labels": "topk_registry.evaluation.labels:main",
    "compare": "topk_registry.evaluation.compare:main",
    "report": "topk_registry.evaluation.report:main",
    "torchvision-train": "topk_registry.train.scripts.torchvision:main",
    "losses": "topk_registry.cli.losses:main",
    "datasets": "topk_registry.cli.losses:datasets",
    "loggers": "topk_registry.cli.losses:loggers",
    "check": "topk_registry.cli.check:main",
    "check-dataset": "topk_registry.cli.check_dataset:main",
    "new-plugin": "topk_registry.cli.new_plugin:main",
    "doctor": "topk_registry.cli.doctor:main",
    "kernels": "topk_registry.cli.kernels:main",
}


def _core() -> dict[str, Plugin]:
    version = installed_version(DISTRIBUTION) or ""
    return {name: Plugin(name, value, DISTRIBUTION, version) for name, value in CORE.items()}


commands: Registry = Registry("topk_registry.commands", "command", reserved=_core())


def summaries() -> str:
    """Every command with its summary or with what is wrong with it, under the distribution that brings it."""
    infos = sorted(commands.infos(), key=lambda info: list(CORE).index(info.name) if info.name in CORE else len(CORE))
    width = max(len(info.name) for info in infos)
    groups: dict[str, list[str]] = {"commands:": []}
    for info in infos:
        owner = f"{info.distribution} {info.version}".rstrip()
        title = "commands:" if info.distribution == DISTRIBUTION else f"commands of {owner}:"
        wrong = f"{info.status}: {info.error}" if info.error else ""
        groups.setdefault(title, []).append(f"  {info.name:<{width}}  {wrong or info.summary}".rstrip())
    return "\n\n".join("\n".join([title, *lines]) for title, lines in groups.items())
