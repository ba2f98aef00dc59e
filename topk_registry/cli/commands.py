"""Commands by name.

A command is an entry point that an installed distribution declares in its own ``pyproject.toml``:

    [project.entry-points."topk_registry.commands"]
    their-command = "their_package.their_module:main"

``main(argv: Sequence[str]) -> int`` takes the arguments after the command's name and returns the exit status. The first
line of its docstring, read from the source file, is its line in ``topk-registry --help``; its module is imported when
the command runs. The rules about owners and disabled plug-ins are those of losses.
"""

from topk_registry.registry.discovery import OURS, Plugin, installed_version
from topk_registry.registry.registry import Registry

# Commands of the core work without an installation: no plug-in can take their names, and no allow list disables them.
CORE = {
    "train": "topk_registry.train.command:main",
    "validate": "topk_registry.train.validate:main",
    "compare": "topk_registry.train.compare:main",
    "run": "topk_registry.train.scripts.run:main",
    "losses": "topk_registry.cli.losses:main",
    "check": "topk_registry.cli.check:main",
    "new-plugin": "topk_registry.cli.new_plugin:main",
    "doctor": "topk_registry.cli.doctor:main",
}
GROUPS = {
    "Train and evaluate": ("train", "validate", "compare", "run"),
    "Losses and plug-ins": ("losses", "check", "new-plugin", "doctor"),
    "Export and predict": ("export", "verify", "calibrate", "predict", "serve"),
}
_VERSION = installed_version(OURS) or ""
commands: Registry = Registry(
    "topk_registry.commands",
    "command",
    reserved={name: Plugin(name, value, OURS, _VERSION) for name, value in CORE.items()},
)


def summaries() -> str:
    """Return every command with its summary, or with what is wrong with it, in groups."""
    infos = {info.name: info for info in commands.infos()}
    width = max(map(len, infos))
    grouped = {name for names in GROUPS.values() for name in names}
    groups = {title: [name for name in names if name in infos] for title, names in GROUPS.items()}
    for name in (name for name in infos if name not in grouped):
        groups.setdefault(f"Commands of {infos[name].distribution or 'this process'}", []).append(name)
    lines = []
    for title, names in groups.items():
        lines += ["", f"{title}:"] if names else []
        for info in map(infos.__getitem__, names):
            about = f"{info.status}: {info.error}" if info.error else info.summary
            lines.append(f"  {info.name:<{width}}  {about}".rstrip())
    return "\n".join(lines).strip()
