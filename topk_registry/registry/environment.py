"""Installed versions, wheels and commands, read from metadata without an import."""

import os
import re
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError, distributions, version
from pathlib import Path

from topk_registry.registry.discovery import normalise


def installed_version(name: str) -> str | None:
    """Return the version of a distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def wheels_of(package: str) -> list[str]:
    """Return the distributions that install files of one import package, as ``name version``.

    Several distributions of one package (onnxruntime and onnxruntime-gpu) overwrite each other's files.
    """
    record = re.compile(rf"^{re.escape(package)}/__init__\.py\b", re.MULTILINE)
    wheels = {
        f"{normalise(name)} {dist.version}"
        for name, dist in _named_distributions()
        if normalise(name).startswith(package) and record.search(dist.read_text("RECORD") or "")
    }
    return sorted(wheels)


def commands_on_path(name: str) -> list[Path]:
    """Return every executable of this name on PATH, the one that a shell runs first."""
    suffixes = os.environ.get("PATHEXT", "").split(os.pathsep) if os.name == "nt" else [""]
    places = [Path(folder, name + suffix) for folder in os.get_exec_path() for suffix in suffixes]
    return list(dict.fromkeys(place for place in places if place.is_file() and os.access(place, os.X_OK)))


def declared_commands(name: str) -> dict[str, str]:
    """Return distributions that declare a console command of this name, by the module that the command runs."""
    return {
        entry.value.partition(":")[0].strip(): owner
        for owner, dist in _named_distributions()
        for entry in _console_scripts(dist)
        if entry.name == name
    }


def wrapped_module(command: Path) -> str | None:
    """Return the module that a console command's wrapper imports, or None for another kind of file."""
    try:
        found = re.search(r"^from ([\w.]+) import \w+", command.read_text(errors="ignore"), re.MULTILINE)
    except OSError:
        return None
    return found[1] if found else None


def _named_distributions() -> Iterator[tuple[str, Distribution]]:
    """Yield every distribution whose metadata has its name; a broken one does not end the search."""
    for dist in distributions():
        try:
            name = dist.metadata["Name"]
        except Exception:
            continue
        if name:
            yield name, dist


def _console_scripts(dist: Distribution) -> Iterable[EntryPoint]:
    try:
        return dist.entry_points.select(group="console_scripts")
    except Exception:  # the registry, which reads the same file, reports it
        return ()
