"""The class :class:`Registry`, which finds and creates the plug-ins of one entry-point group by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import invalidate_caches
from types import MappingProxyType
from typing import Any, TypeVar

from topk_registry.registry.discovery import OURS, Plugin, denied, discover, matches, misspelt_groups, normalize
from topk_registry.registry.errors import (
    AmbiguousPluginError,
    BrokenPluginError,
    DisabledPluginError,
    NameTakenError,
    UnknownPluginError,
)
from topk_registry.registry.options import check_options, unbound

Builder = Callable[..., Any]
B = TypeVar("B", bound=Builder)


@dataclass(frozen=True)
class LossInfo:
    """Facts about a loss, data set, command or kind of model file. The facts are read without importing the plug-in.

    ``status`` is ``"available"``, ``"registered"`` (by code of this process), ``"broken"`` or ``"disabled"``.
    ``"broken"`` means that the package of the plug-in is not installed, or that its import failed in this process.
    """

    name: str  # name, or "distribution:name" if the name alone selects another plug-in or is ambiguous
    distribution: str  # distribution that declares the plug-in; empty if this process registered the plug-in
    version: str  # version of the distribution
    value: str  # "module:attribute" of the class or function that creates the object
    status: str
    error: str  # reason why the plug-in is broken or disabled, else empty
    summary: str  # first line of the docstring; empty if the plug-in is broken or disabled


class Registry:
    """The plug-ins of one entry-point group, the plug-ins that this process registered, and reserved plug-ins.

    Args:
        group: entry-point group, such as ``"topk_registry.losses"``.
        kind: noun for error messages: ``"loss"``, ``"dataset"``, ``"command"`` or ``"model file"``.
        reserved: plug-ins by name. No other plug-in can have these names, and no environment variable disables them.
    """

    def __init__(self, group: str, kind: str, *, reserved: Mapping[str, Plugin] = MappingProxyType({})) -> None:
        self.group, self.kind, self._reserved = group, kind, reserved
        self._registered: dict[str, Plugin] = {}
        self.refresh()

    def refresh(self) -> None:
        """Search for installed plug-ins again at the next use. Plug-ins that this process registered remain."""
        invalidate_caches()
        self._discovered: tuple[list[Plugin], list[str]] | None = None
        self._failed: dict[Plugin, str] = {}

    def problems(self) -> list[str]:
        """Return one message per installed distribution with unreadable metadata."""
        return self._discover()[1]

    def names(self, filter: str | Sequence[str] = "", *, exclude: str | Sequence[str] = "") -> list[str]:
        """Return the sorted names that match ``filter`` but not ``exclude``, without the names of disabled plug-ins."""
        return sorted(name for name, owners in self._by_name().items() if any(_hit(p, filter, exclude) for p in owners))

    def infos(self, filter: str | Sequence[str] = "", *, exclude: str | Sequence[str] = "") -> list[LossInfo]:
        """Return facts about all plug-ins that match ``filter`` but not ``exclude``, including disabled plug-ins."""
        plugins = (*self._reserved.values(), *self._registered.values(), *self._discover()[0])
        found = [plugin for plugin in plugins if _hit(plugin, filter, exclude)]
        found.sort(key=lambda plugin: (plugin.name, plugin.distribution))
        owners = self._by_name()
        return [self._info(p, p.name if owners.get(p.name, []) in ([p], []) else p.qualified) for p in found]

    def info(self, name: str) -> LossInfo:
        return self._info(self._pick(name), name)

    def __contains__(self, name: str) -> bool:
        return bool(self._owners(name))

    def builder(self, name: str) -> Builder:
        """Import a plug-in, and return its class or function. If the import fails, raise BrokenPluginError."""
        plugin = self._pick(name)
        try:
            builder: Any = plugin.load()
            _check_factory(builder)
        except (Exception, SystemExit) as error:
            self._failed[plugin] = f"{type(error).__name__}: {error}"
            raise BrokenPluginError(
                f"{self.kind} {name!r} of {plugin.owner} is broken: {self._failed[plugin]}"
            ) from error
        return builder

    def create(self, name: str, factory: Builder | None = None, /, **options: Any) -> Any:
        """Create the object of a plug-in: call ``factory`` (default: ``self.builder(name)``) with the options.

        If the factory raises an exception other than TypeError and ValueError, raise BrokenPluginError instead.
        """
        factory = factory or self.builder(name)
        check_options(f"{self.kind} {name!r}", factory, options)
        try:
            return factory(**options)
        except (TypeError, ValueError, BrokenPluginError):
            raise
        except (Exception, SystemExit) as error:  # SystemExit of a factory must not end the process
            raise BrokenPluginError(f"{self.kind} {name!r} fails: {type(error).__name__}: {error}") from error

    def register(self, name: str, *, override: bool = False) -> Callable[[B], B]:
        """Return a decorator that registers a class or function in this process, as :func:`register_loss` does."""
        if not isinstance(name, str) or not name or any(c in ":*?[]," or c.isspace() for c in name):
            example = f"@register_{self.kind}('mine')"
            raise ValueError(f"expected a name without spaces, colons, commas and wildcards, {example}, got {name!r}")

        def decorate(builder: B) -> B:
            _check_factory(builder)
            owners = self._owners(name)
            if owners and (name in self._reserved or not override):
                remedy = "choose another" if name in self._reserved else "override=True replaces it here"
                raise NameTakenError(f"{self.kind} {name!r} is taken by {owners[0].owner}; {remedy}")
            inner: Any = unbound(builder)
            value = f"{inner.__module__}:{getattr(inner, '__qualname__', type(inner).__qualname__)}"
            self._registered[name] = Plugin(name, value, "", "", builder)
            return builder

        return decorate

    def _discover(self) -> tuple[list[Plugin], list[str]]:
        if self._discovered is None:
            self._discovered = discover(self.group)
        return self._discovered

    def _by_name(self, owner: str = "", *, disabled: bool = False) -> dict[str, list[Plugin]]:
        found = [plugin for plugin in self._discover()[0] if disabled or not denied(plugin)]
        ours = [plugin for plugin in found if normalize(plugin.distribution) == OURS]
        others = [plugin for plugin in found if normalize(plugin.distribution) != OURS]
        owners: dict[str, list[Plugin]] = {}
        # in ascending priority: a later tier replaces the plug-ins of earlier tiers with the same name
        for tier in (others, ours, self._registered.values(), self._reserved.values()):
            tier = [plugin for plugin in tier if normalize(owner) in ("", normalize(plugin.distribution))]
            owners |= {name: [p for p in tier if p.name == name] for name in {p.name for p in tier}}
        return owners

    def _owners(self, name: str, *, disabled: bool = False) -> list[Plugin]:
        owner, _, bare = name.rpartition(":")
        return self._by_name(owner, disabled=disabled).get(bare, [])

    def _pick(self, name: str) -> Plugin:
        if not isinstance(name, str):
            raise TypeError(f"the name of a {self.kind} is a string, got {name!r}")
        owners = self._owners(name)
        if not owners and (out := self._owners(name, disabled=True)):
            raise DisabledPluginError(f"{self.kind} {name!r} of {out[0].owner} is disabled by {denied(out[0])}")
        if not owners:
            raise UnknownPluginError(f"no {self.kind} is called {name!r}; {self._hint(name.rpartition(':')[2])}")
        if len(owners) > 1:
            declared = " and ".join(plugin.owner for plugin in owners)
            picks = " or ".join(repr(plugin.qualified) for plugin in owners)
            raise AmbiguousPluginError(f"{self.kind} {name!r} is declared by {declared}; ask for {picks}")
        return owners[0]

    def _hint(self, name: str) -> str:
        for message, entries in misspelt_groups():
            if name in entries:
                return f"{message} `topk-registry doctor` checks all plug-ins"
        close = get_close_matches(name, self.names(), n=3, cutoff=0.5)
        hint = f"the closest are {', '.join(close)}" if close else f"there are {', '.join(self.names()) or 'none'}"
        listing = {"loss": "; `topk-registry losses` lists all", "command": "; `topk-registry --help` lists all"}
        return hint + listing.get(self.kind, "")

    def _info(self, plugin: Plugin, name: str) -> LossInfo:
        status, error = ("registered" if plugin.factory else "available"), ""
        if plugin in self._discover()[0] and (variable := denied(plugin)):
            status, error = "disabled", f"disabled by {variable}"
        elif problem := self._failed.get(plugin, "") or plugin.problem():
            status, error = "broken", problem
        summary = "" if error else plugin.summary()
        return LossInfo(name, plugin.distribution, plugin.version, plugin.value, status, error, summary)


def _hit(plugin: Plugin, filter: str | Sequence[str], exclude: str | Sequence[str]) -> bool:
    wanted, unwanted = ([each] if isinstance(each, str) else each for each in (filter or "*", exclude))
    return any(matches(pattern, plugin) for pattern in wanted) and not any(matches(each, plugin) for each in unwanted)


def _check_factory(builder: Any) -> None:
    is_module = any(base.__module__ == "torch.nn.modules.module" for base in type(builder).__mro__)
    if is_module or not callable(builder):
        raise TypeError(f"expected a class or a function, got an instance of {type(builder).__name__}")
