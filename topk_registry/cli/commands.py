"""Commands by name.

A command is an entry point that an installed distribution declares in its ``pyproject.toml``:

    [project.entry-points."topk_registry.commands"]
    their-command = "their_package.their_module:main"

``main(argv: Sequence[str]) -> int`` takes the arguments after the command name and returns the exit status. The first
line of its docstring is the summary in ``topk-registry --help``. The module is imported when the command runs.
"""

from topk_registry.registry.discovery import OURS, Plugin, installed_version
from topk_registry.registry.registry import Registry

# Commands of the core work without an installation. No plug-in can use their names, and no allow list disables them.
CORE = {
    "train": "topk_registry.train.command:main",
    "validate": "topk_registry.train.validate:main",
    "compare": "topk_registry.train.compare:main",
    "run": "topk_registry.train.scripts.run:main",
    **{
        name: f"topk_registry.cli.{name.replace('-', '_')}:main" for name in ("losses", "check", "new-plugin", "doctor")
    },
}
GROUPS = {
    "Train and evaluate": ("train", "validate", "compare", "run"),
    "Losses and plug-ins": ("losses", "check", "new-plugin", "doctor"),
    "Export and predict": ("export", "verify", "calibrate", "predict", "serve"),
}
_RESERVED = {name: Plugin(name, value, OURS, installed_version(OURS) or "") for name, value in CORE.items()}
commands: Registry = Registry("topk_registry.commands", "command", reserved=_RESERVED)


def summaries() -> str:
    """Return every command in groups, with its summary or its problem."""
    titles = {name: title for title, names in GROUPS.items() for name in names}
    groups: dict[str, list[str]] = {title: [] for title in GROUPS}
    infos = sorted(commands.infos(), key=lambda info: [*titles, info.name].index(info.name))
    width = max(len(info.name) for info in infos)
    for info in infos:
        title = titles.get(info.name, f"Commands of {info.distribution or 'this process'}")
        about = f"{info.status}: {info.error}" if info.error else info.summary
        groups.setdefault(title, []).append(f"  {info.name:<{width}}  {about}".rstrip())
    return "\n\n".join("\n".join([f"{title}:", *lines]) for title, lines in groups.items() if lines)
