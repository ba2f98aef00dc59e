"""The class :class:`Registry`, which finds and creates the plug-ins of one entry-point group by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib import invalidate_caches
from inspect import isroutine
from types import MappingProxyType
from typing import Any, TypeVar

from topk_registry.errors import (
    AmbiguousPluginError,
    BrokenPluginError,
    DisabledPluginError,
    NameTakenError,
    UnknownPluginError,
)
from topk_registry.registry.discovery import OURS, Plugin, denied, discover, matches, misspelt_groups, normalize
from topk_registry.registry.signatures import check_options, unbound

Builder = Callable[..., Any]
B = TypeVar("B", bound=Builder)


@dataclass(frozen=True)
class LossInfo:
    """Facts about a plug-in: a loss, data set, command or reader of model files. The plug-in is not imported.

    ``status`` is ``"available"``, ``"registered"`` (by code of this process), ``"broken"`` or ``"disabled"``.
    ``"broken"`` means that Python does not find the package of the plug-in, or that its import failed in this process.
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
        self.group = group
        self.kind = kind
        self._reserved = reserved
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
        """Return the names of all plug-ins that are not disabled, in alphabetical order, without importing a plug-in.

        Args:
            filter: one or more patterns with wildcards, as in ``timm.list_models``. Only names that match a pattern are
                returned. ``"topk"`` matches only the name topk, ``"*topk*"`` matches every name that contains topk, and
                ``"distribution:*"`` matches all plug-ins of one distribution. Default: all names.
            exclude: one or more patterns. Names that match a pattern are not returned.

        Example:
            >>> list_losses("topk_hinge*", exclude="*_convex")  # for losses, this method is called list_losses
            ['topk_hinge', 'topk_hinge_calibrated']
        """
        return sorted(name for name, owners in self._by_name().items() if any(_hit(p, filter, exclude) for p in owners))

    def infos(self, filter: str | Sequence[str] = "", *, exclude: str | Sequence[str] = "") -> list[LossInfo]:
        """Return facts about the plug-ins that match ``filter`` but not ``exclude``, including disabled plug-ins."""
        plugins = (*self._reserved.values(), *self._registered.values(), *self._discover()[0])
        found = sorted((p for p in plugins if _hit(p, filter, exclude)), key=lambda p: (p.name, p.distribution))
        owners = self._by_name()
        return [self._info(p, p.name if owners.get(p.name, []) in ([p], []) else p.qualified) for p in found]

    def info(self, name: str) -> LossInfo:
        """Return facts about a plug-in, such as its distribution and its version, without importing the plug-in.

        If the name is unknown or ambiguous, or an environment variable disables the plug-in, raise a ``PluginError``.
        """
        return self._info(self._pick(name), name)

    def __contains__(self, name: str) -> bool:
        """Return whether a plug-in with this name, or ``distribution:name``, exists and is not disabled."""
        return bool(self._owners(name))

    def builder(self, name: str) -> Builder:
        """Import a plug-in, and return its class or function. If the import fails, raise ``BrokenPluginError``."""
        plugin = self._pick(name)
        try:
            builder: Any = plugin.load()
            _check_factory(builder)
        except (Exception, SystemExit) as error:
            self._failed[plugin] = reason = f"{type(error).__name__}: {error}"
            raise BrokenPluginError(f"{self.kind} {name!r} of {plugin.owner} is broken: {reason}") from error
        return builder

    def create(self, name: str, factory: Builder | None = None, /, **options: Any) -> Any:
        """Create the object of a plug-in: call ``factory`` (default: ``self.builder(name)``) with the options."""
        factory = factory or self.builder(name)
        check_options(f"{self.kind} {name!r}", factory, options)
        return factory(**options)

    def register(self, name: str, *, override: bool = False) -> Callable[[B], B]:
        """Return a decorator that registers a class or function in this process, for example in a notebook.

        The decorated class or function takes the options of the plug-in and returns the object, such as the loss.

        Args:
            name: name of the plug-in. A name that the registry reserves, such as a timm loss, raises an error.
            override: If a plug-in with this name exists and ``override`` is False, the decorator raises an error. If
                True, the new plug-in replaces it in this process. ``distribution:name`` still selects the old plug-in.

        Example:
            >>> @register_loss("my_loss")  # for losses, this method is called register_loss
            ... def my_loss(scale: float = 1.0):
            ...     return lambda logits, target: scale * logits.logsumexp(-1).mean()
        """
        if not isinstance(name, str) or not name or any(c in ":*?[]," or c.isspace() for c in name):
            example = f"@register_{self.kind}('mine')"
            raise ValueError(f"expected a name without spaces, colons, commas and wildcards, {example}, got {name!r}")

        def decorate(builder: B) -> B:
            _check_factory(builder)
            owners = self._owners(name)
            if owners and (name in self._reserved or not override):
                remedy = "choose another" if name in self._reserved else "override=True replaces it here"
                raise NameTakenError(f"{self.kind} {name!r} is taken by {owners[0].owner}; {remedy}")
            inner = unbound(builder)
            self._registered[name] = Plugin(name, f"{inner.__module__}:{inner.__qualname__}", "", "", builder)
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
            raise UnknownPluginError(f"no {self.kind} is called {name!r}; {self._hint(name)}")
        if len(owners) > 1:
            declared = " and ".join(plugin.owner for plugin in owners)
            picks = " or ".join(repr(plugin.qualified) for plugin in owners)
            raise AmbiguousPluginError(f"{self.kind} {name!r} is declared by {declared}; ask for {picks}")
        return owners[0]

    def _hint(self, name: str) -> str:
        owner, _, bare = name.rpartition(":")
        if found := [message for message, entries in misspelt_groups() if bare in entries]:
            return f"{found[0]} `topk-registry doctor` checks all plug-ins"
        gone = f"no installed distribution {owner!r} has a {self.kind}; " if not self.infos(f"{owner or '*'}:*") else ""
        close = get_close_matches(bare, self.names(), n=3, cutoff=0.5)
        hint = f"the closest are {', '.join(close)}" if close else f"there are {', '.join(self.names()) or 'none'}"
        listing = {"loss": "; `topk-registry losses` lists all", "command": "; `topk-registry --help` lists all"}
        return gone + hint + listing.get(self.kind, "")

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
    if not isinstance(builder, (type, partial)) and not isroutine(builder):
        raise TypeError(f"expected a class or a function, got an instance of {type(builder).__name__}")
