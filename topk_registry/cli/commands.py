"""The table of all commands, including the commands of plug-ins.

An installed distribution defines a command by an entry point in its ``pyproject.toml``:

    [project.entry-points."topk_registry.commands"]
    their-command = "their_package.their_module:main"

The function ``main(argv: Sequence[str]) -> int`` gets the arguments after the command name and returns the exit status.
``topk-registry --help`` shows the first line of the docstring of ``main``, and reads this line from the source file.
The module is imported only when the command runs.
"""

from topk_registry.registry.discovery import OURS, Plugin, installed_version
from topk_registry.registry.registry import Registry

# The commands of this package also work from a checkout that is not installed. A plug-in cannot define a command with
# one of these names, and the environment variables that disable plug-ins do not disable these commands.
TRAINING = {
    "train": "topk_registry.train.command:main",
    "validate": "topk_registry.train.validate:main",
    "compare": "topk_registry.train.compare:main",
    "run": "topk_registry.train.scripts.run:main",
}
LOSSES = {
    "losses": "topk_registry.cli.losses:main",
    "check": "topk_registry.cli.check:main",
    "new-plugin": "topk_registry.cli.new_plugin:main",
    "doctor": "topk_registry.cli.doctor:main",
}
CORE = TRAINING | LOSSES
_RESERVED = {name: Plugin(name, value, OURS, installed_version(OURS) or "") for name, value in CORE.items()}
commands: Registry = Registry("topk_registry.commands", "command", reserved=_RESERVED)


def summaries() -> str:
    """Return the list of commands in ``--help``: per command its summary, or the error if its plug-in is broken."""
    groups: dict[str, list[str]] = {"Train and evaluate": [*TRAINING], "Losses and plug-ins": [*LOSSES]}
    infos = {info.name: info for info in commands.infos()}
    for name, info in infos.items():
        if name not in CORE:
            title = "Export and predict" if info.distribution == OURS else f"Commands of {info.distribution}"
            groups.setdefault(title, []).append(name)
    width = max(map(len, infos))
    about = {i.name: f"{i.status}: {i.error}" if i.error else i.summary for i in infos.values()}
    lines = {title: [f"  {name:<{width}}  {about[name]}" for name in names] for title, names in groups.items()}
    return "\n\n".join("\n".join([f"{title}:", *rows]) for title, rows in lines.items())
