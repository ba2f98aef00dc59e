"""The names of one entry-point group: owners, status, and factories."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
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
    MissingPackageError,
    NameTakenError,
    UnknownPluginError,
)
from topk_registry.registry.options import check_options, unbound

Builder = Callable[..., Any]
B = TypeVar("B", bound=Builder)


@dataclass(frozen=True)
class LossInfo:
    """Owner, version, status and summary of a loss, data set or command, without importing it.

    ``status`` is ``available`` (found, not imported), ``loaded`` (imported by this process), ``registered`` (by code of
    this process), ``timm`` (a loss of timm), ``broken``, ``ambiguous`` or ``disabled``. For the last three, ``error``
    has the reason. A plug-in that fails on import is ``broken`` only after the first attempt.
    """

    name: str
    distribution: str
    version: str
    value: str
    status: str
    error: str
    summary: str


class Registry:
    """The names of one entry-point group, including names registered by this process and reserved names.

    Args:
        group: entry-point group.
        kind: kind of object for messages: ``loss``, ``dataset``, ``command``, ``model file``.
        reserved: names that no plug-in can use and that no environment variable disables.
    """

    def __init__(self, group: str, kind: str, *, reserved: Mapping[str, Plugin] = MappingProxyType({})) -> None:
        self.group, self.kind, self._reserved = group, kind, dict(reserved)
        self._registered: dict[str, Plugin] = {}
        self.refresh()

    def refresh(self) -> None:
        """Forget discovered, loaded and broken plug-ins. Registrations of this process remain."""
        invalidate_caches()
        self._found: tuple[list[Plugin], list[str]] | None = None
        self._loaded: dict[Plugin, Builder] = {}
        self._failed: dict[Plugin, str] = {}

    def problems(self) -> list[str]:
        return self._discovered()[1]

    def names(self, filter: str | Sequence[str] = "", *, exclude: str | Sequence[str] = "") -> list[str]:
        """Return the sorted names that match, including broken and ambiguous ones, without disabled ones."""
        every = {plugin.name for plugin in self._allowed(self._every())}
        return sorted(name for name in every if _hit(self._candidates(name), filter, exclude))

    def infos(self, filter: str | Sequence[str] = "", *, exclude: str | Sequence[str] = "") -> list[LossInfo]:
        """Describe every name that matches, including disabled names, and shadowed names as ``distribution:name``."""
        names = {p.name for p in self._every() if _hit(self._candidates(p.name), filter, exclude)}
        names |= {plugin.qualified for plugin in self.shadowed() if _hit([plugin], filter, exclude)}
        return [self.info(name) for name in sorted(names, key=lambda name: (name.rpartition(":")[2], name))]

    def shadowed(self) -> list[Plugin]:
        """Return the plug-ins whose name belongs to another owner; ``distribution:name`` still selects them."""
        found = []
        for plugin in self._allowed(self._discovered()[0]):
            with suppress(AmbiguousPluginError):
                if _owner(self._pick(plugin.name)) != _owner(plugin):
                    found.append(plugin)
        return found

    def info(self, name: str) -> LossInfo:
        """Describe a name without importing it."""
        try:
            plugin = self._pick(name)
        except (AmbiguousPluginError, DisabledPluginError) as error:
            status = "ambiguous" if isinstance(error, AmbiguousPluginError) else "disabled"
            candidates = self._candidates(name)
            owners = ", ".join(plugin.distribution for plugin in self._allowed(candidates) or candidates)
            return LossInfo(name, owners, "", "", status, str(error), "")
        about = (name, plugin.distribution, plugin.version, plugin.value)
        loaded = plugin in self._loaded
        if problem := self._failed.get(plugin, "") or ("" if loaded else plugin.problem()):
            return LossInfo(*about, "broken", problem, "")
        status = "loaded" if loaded and plugin.status == "available" else plugin.status
        return LossInfo(*about, status, "", plugin.summary())

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and bool(self._allowed(self._candidates(name)))

    def builder(self, name: str) -> Builder:
        """Return the factory of a name. This imports its plug-in, which runs the plug-in's code."""
        plugin = self._pick(name)
        if plugin not in self._loaded:
            try:
                builder: Any = plugin.load()
                _check_factory(builder)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # SystemExit and pytest's Skipped are not subclasses of Exception
                missing = isinstance(error, MissingPackageError)
                self._failed[plugin] = str(error) if missing else _reason(error)
                verb = "cannot be used" if missing else "is broken"
                raise BrokenPluginError(f"{self._describe(plugin)} {verb}: {self._failed[plugin]}") from error
            self._loaded[plugin] = builder
        return self._loaded[plugin]

    def create(self, name: str, **options: Any) -> Any:
        return self.build(name, self.builder(name), options)

    def build(self, name: str, factory: Builder, options: Mapping[str, Any]) -> Any:
        """Call a factory. Its TypeError and ValueError propagate; any other error becomes a BrokenPluginError."""
        check_options(f"{self.kind} {name!r}", factory, options)
        try:
            return factory(**options)
        except (TypeError, ValueError, BrokenPluginError, KeyboardInterrupt):
            raise
        except BaseException as error:  # SystemExit of a factory must not end a training run
            hint = "; call super().__init__() first" if "before Module.__init__" in str(error) else ""
            raise BrokenPluginError(f"{self.describe(name)} cannot be built: {_reason(error)}{hint}") from error

    def describe(self, name: str) -> str:
        """Return kind, name, owner and entry-point value as text, for messages."""
        return self._describe(self._pick(name))

    def register(self, name: str, *, override: bool = False) -> Callable[[B], B]:
        """Return a decorator that registers a factory under a name in this process. See :func:`register_loss`."""
        if not isinstance(name, str):
            raise TypeError(f"the name of a {self.kind} is a string, as in @register_{self.kind}('mine'), got {name!r}")
        if not name or any(c in ":*?[]," or c.isspace() for c in name):
            raise ValueError(f"the name of a {self.kind} contains no space, colon, comma or wildcard, got {name!r}")

        def decorate(builder: B) -> B:
            _check_factory(builder)
            if name in self._reserved:
                owner, names = self._reserved[name].distribution, ", ".join(self._reserved)
                raise NameTakenError(f"{name!r} is one of {owner}'s names ({names}): choose another")
            if not override and name in self and getattr(self._registered.get(name), "factory", None) is not builder:
                owners = ", ".join(plugin.owner for plugin in self._candidates(name))
                raise NameTakenError(f"{self.kind} {name!r} is taken by {owners}; override=True replaces it here")
            inner: Any = unbound(builder)
            value = f"{inner.__module__}:{getattr(inner, '__qualname__', type(inner).__qualname__)}"
            self._registered[name] = Plugin(name, value, "", "", builder)
            return builder

        return decorate

    def unregister(self, name: str) -> None:
        """Remove a registration of this process. A plug-in that it replaced becomes visible again."""
        if self._registered.pop(name, None) is None:
            raise UnknownPluginError(f"this process has registered no {self.kind} {name!r}")

    def _discovered(self) -> tuple[list[Plugin], list[str]]:
        if self._found is None:
            plugins, problems = discover(self.group)
            self._found = sorted(plugins, key=lambda plugin: plugin.qualified), problems
        return self._found

    def _every(self) -> Iterable[Plugin]:
        return [*self._reserved.values(), *self._registered.values(), *self._discovered()[0]]

    def _candidates(self, name: str) -> list[Plugin]:
        owner, _, bare = name.rpartition(":")
        if bare in self._reserved and normalize(owner) in ("", _owner(self._reserved[bare])):
            return [self._reserved[bare]]
        if not owner and bare in self._registered:
            return [self._registered[bare]]
        return [p for p in self._discovered()[0] if p.name == bare and (not owner or _owner(p) == normalize(owner))]

    def _pick(self, name: str) -> Plugin:
        if not isinstance(name, str):
            raise TypeError(f"the name of a {self.kind} is a string, got {name!r}")
        candidates = self._candidates(name)
        allowed = self._allowed(candidates)
        ours = [plugin for plugin in allowed if _owner(plugin) == OURS]
        if len(allowed) == 1 or len(ours) == 1:  # names of this project have priority
            return (ours or allowed)[0]
        if allowed:
            owners = " and ".join(f"{plugin.owner} ({plugin.value})" for plugin in allowed)
            picks = [plugin.qualified for plugin in allowed]
            single = sorted(repr(pick) for pick in picks if picks.count(pick) == 1)
            remedy = f"ask for {' or '.join(single)}" if single else "only its author can fix that"
            raise AmbiguousPluginError(f"{self.kind} {name!r} is declared by {owners}; {remedy}")
        if candidates:
            raise DisabledPluginError(f"{self._describe(candidates[0])} is disabled by {denied(candidates[0])}")
        raise UnknownPluginError(f"no {self.kind} is called {name!r}; {self._hint(name.rpartition(':')[2])}")

    def _hint(self, name: str) -> str:
        for message, entries in misspelt_groups():
            if name in entries:
                return f"{message} `topk-registry doctor` checks all plug-ins"
        lower = {other.lower(): other for other in self.names()}
        close = [lower[other] for other in get_close_matches(name.lower(), lower, n=3, cutoff=0.5)]
        hint = f"the closest are {', '.join(close)}" if close else f"there are {', '.join(self.names()) or 'none'}"
        listing = {"loss": "; `topk-registry losses` lists all", "command": "; `topk-registry --help` lists all"}
        return hint + listing.get(self.kind, "")

    def _allowed(self, plugins: Iterable[Plugin]) -> list[Plugin]:
        free = [*self._reserved.values(), *self._registered.values()]
        return [plugin for plugin in plugins if plugin in free or not denied(plugin)]

    def _describe(self, plugin: Plugin) -> str:
        return f"{self.kind} {plugin.name!r} of {plugin.owner} ({plugin.value})"


def _owner(plugin: Plugin) -> str:
    return normalize(plugin.distribution)


def _hit(plugins: Sequence[Plugin], filter: str | Sequence[str], exclude: str | Sequence[str]) -> bool:
    """Return whether any plug-in matches a wildcard of ``filter`` and none matches ``exclude``."""
    wanted, unwanted = ([each] if isinstance(each, str) else each for each in (filter or "*", exclude))
    if any(matches(pattern, plugin) for pattern in unwanted for plugin in plugins):
        return False
    return any(matches(pattern, plugin) for pattern in wanted for plugin in plugins)


def _check_factory(builder: Any) -> None:
    kind = type(builder)
    if any(base.__module__.startswith("torch.nn.modules") for base in kind.__mro__):
        raise TypeError(f"expected a class or a function that returns a loss, got an instance of {kind.__name__}")
    if not callable(builder):
        raise TypeError(f"expected a class or a function, got {kind.__name__}")


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
