"""Public names of a package that are imported on first use."""

from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the functions ``__getattr__`` and ``__dir__`` of a package.

    ``lazy_loader.attach_stub`` is not used, because its error for a misspelled name lists no available names, and
    because the installation without torch would need one more dependency.

    Args:
        package: name of the package.
        homes: module of each name, relative to the package. If the module is "", the name is a module itself.
    """

    def get(name: str) -> object:
        if name in homes:
            module = import_module(f"{package}.{homes[name] or name}")
            return getattr(module, name) if homes[name] else module
        from topk_registry.registry.source import closest

        hint = closest(name, homes)
        raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}; it has {', '.join(sorted(homes))}")

    return get, lambda: sorted(homes)
