"""The names of one entry-point group: who owns each, its state, and the factory behind it."""

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import invalidate_caches
from threading import RLock
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from topk_registry.registry import source, timm_losses
from topk_registry.registry.discovery import OURS, Plugin, denied, discover, matches, normalise
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
Status = Literal["available", "loaded", "registered", "timm", "broken", "ambiguous", "disabled"]
B = TypeVar("B", bound=Builder)
_LISTINGS = {
    "loss": "`topk-registry losses` lists all",
    "logger": "`topk-registry loggers` lists all",
    "command": "`topk-registry --help` lists all",
    "dataset": "`topk-registry datasets` lists all",
}


@dataclass(frozen=True)
class LossInfo:
    """Owner, version, status and summary of a loss, data set, logger or command, without an import.

    ``status`` is ``available`` (found, not imported), ``loaded`` (imported by this process), ``registered`` (by this
    process's own code), ``timm`` (timm's own), or ``broken``, ``ambiguous`` or ``disabled``, and then ``error`` says
    why. A plug-in that fails only when it is imported is known to be broken once it was asked for.
    """

    name: str
    distribution: str
    version: str
    value: str
    status: Status
    error: str
    summary: str


class Registry:
    """The names of one entry-point group, those that this process registered, and reserved ones.

    Args:
        group: the entry-point group that is read.
        kind: what a name stands for, as errors call it: ``loss``, ``dataset``, ``logger``, ``command`` and so on.
        reserved: names that nobody else can take and that no environment variable disables, with what they stand for.
    """

    def __init__(self, group: str, kind: str, *, reserved: Mapping[str, Plugin] = MappingProxyType({})) -> None:
        self.group = group
        self.kind = kind
        self._reserved = dict(reserved)
        self._registered: dict[str, Builder] = {}
        self._found: dict[str, list[Plugin]] | None = None
        self._problems: list[str] = []
        self._loaded: dict[Plugin, Builder] = {}
        self._failed: dict[Plugin, str] = {}
        self._lock = RLock()

    def refresh(self) -> None:
        """Forget what was found, loaded and broken; what this process registered stays."""
        with self._lock:
            invalidate_caches()
            self._found = None
            self._loaded.clear()
            self._failed.clear()

    def problems(self) -> list[str]:
        """Return a line for each installed distribution whose metadata could not be read."""
        self._plugins()
        return list(self._problems)

    def shadowed(self) -> list[Plugin]:
        """Return the plug-ins of others that have a name of ours, and are asked for as ``distribution:name`` alone."""
        of_others = [plugin for plugin in self.plugins() if normalise(plugin.distribution) != OURS]
        return [
            plugin
            for plugin in self._allowed(of_others)
            if normalise(self._owner_of(plugin.name)) not in ("", normalise(plugin.distribution))
        ]

    def plugins(self) -> list[Plugin]:
        """Return every declaration that was found, disabled ones too."""
        return [plugin for owners in self._plugins().values() for plugin in owners]

    def names(self, filter: str | Sequence[str] = "", *, exclude: str | Sequence[str] = "") -> list[str]:
        """Return the sorted names that match, broken and ambiguous ones too, disabled ones not."""
        return [name for name in self._every_name(filter, exclude) if not self._is_disabled(name)]

    def infos(self, filter: str | Sequence[str] = "", *, exclude: str | Sequence[str] = "") -> list[LossInfo]:
        """Describe every name that matches, disabled ones too."""
        return [self.info(name) for name in self._every_name(filter, exclude)]

    def info(self, name: str) -> LossInfo:
        """Describe a name without an import."""
        try:
            plugin = self._pick(name)
        except (AmbiguousPluginError, DisabledPluginError) as error:
            status: Status = "ambiguous" if isinstance(error, AmbiguousPluginError) else "disabled"
            candidates = self._candidates(name)
            owners = ", ".join(plugin.distribution for plugin in self._allowed(candidates) or candidates)
            return LossInfo(name, owners, "", "", status, str(error), "")
        status, error = self._state(plugin)
        return LossInfo(
            name, plugin.distribution, plugin.version, plugin.value, status, error, self._summary(plugin, status)
        )

    def declares(self, name: str, attribute: str) -> bool:
        """Return whether the factory behind a name says ``attribute = True``, by its source where it is not loaded."""
        plugin = self._pick(name)
        loaded = self._loaded.get(plugin) if plugin.distribution else self._registered[plugin.name]
        if loaded is not None:
            return getattr(unbound(loaded), attribute, False) is True
        return not self._is_timms(plugin) and source.declares(*plugin.parse(), attribute)

    def is_misdeclared(self, name: str) -> bool:
        """Return whether metadata and source, without an import, show that the plug-in behind a name cannot work."""
        plugin = self._pick(name)
        return bool(plugin.distribution and not self._is_timms(plugin) and _visible_problem(plugin))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and not self._is_disabled(name)

    def builder(self, name: str) -> Builder:
        """Return the factory behind a name. This imports its plug-in, which runs the plug-in's code.

        Raises:
            UnknownPluginError, AmbiguousPluginError, DisabledPluginError: the name picks no single plug-in.
            BrokenPluginError: its plug-in cannot be imported or is no factory; the cause is chained.
        """
        plugin = self._pick(name)
        if self._is_timms(plugin):
            return timm_losses.builder(plugin.name)
        return self._registered[plugin.name] if not plugin.distribution else self._load(plugin)

    def create(self, name: str, **options: Any) -> Any:
        """Call the factory behind a name with these options; errors as in :meth:`build`."""
        return self.build(name, self.builder(name), options)

    def build(self, name: str, factory: Builder, options: Mapping[str, Any]) -> Any:
        """Call the factory that :meth:`builder` returned for a name.

        A TypeError names options that the factory does not take, or misses. The factory's own TypeError and
        ValueError speak of the options and pass through, and its assertions, where there are options, are about them;
        any other failure is a BrokenPluginError.
        """
        check_options(f"{self.kind} {name!r}", factory, options)
        try:
            return factory(**options)
        except (TypeError, ValueError, BrokenPluginError, KeyboardInterrupt):
            raise
        except BaseException as error:  # a factory that calls sys.exit ends itself, not the training run
            if options and isinstance(error, AssertionError):
                given = ", ".join(f"{option}={value!r}" for option, value in options.items())
                said = str(error) or (traceback.extract_tb(error.__traceback__)[-1].line or "an assertion").strip()
                raise ValueError(f"{self.describe(name)} does not accept {given}: {said}") from error
            raise BrokenPluginError(f"{self.describe(name)} failed while it built: {_reason(error)}") from error

    def describe(self, name: str) -> str:
        """Return kind, name, owner and value in one phrase, for errors."""
        return _describe(self.kind, self._pick(name))

    def register(self, name: str, *, override: bool = False) -> Callable[[B], B]:
        """Return a decorator that registers a factory under a name in this process; see :func:`register_loss`."""
        if not isinstance(name, str):
            raise TypeError(f"the name of a {self.kind} is a string, as in @register_{self.kind}('mine'), got {name!r}")
        if not name or any(c in ":*?[]," or c.isspace() for c in name):
            raise ValueError(f"the name of a {self.kind} has no space, colon, comma or wildcard in it, got {name!r}")

        def decorate(builder: B) -> B:
            if not callable(builder):
                raise TypeError(f"{self.kind} {name!r} needs a callable factory, got {type(builder).__name__}")
            with self._lock:
                self._check_free(name, builder, override)
                self._registered[name] = builder
            return builder

        return decorate

    def unregister(self, name: str) -> None:
        """Remove this process's own registration of a name; a plug-in that it hid is visible again."""
        with self._lock:
            if self._registered.pop(name, None) is None:
                raise UnknownPluginError(f"this process has registered no {self.kind} {name!r}")

    def _check_free(self, name: str, builder: Builder, override: bool) -> None:
        if name in self._reserved:
            owner, own = self._reserved[name].distribution, ", ".join(self._reserved)
            raise NameTakenError(f"{name!r} is one of {owner}'s own names ({own}): choose another")
        if not override and name in self and self._registered.get(name) is not builder:
            owners = ", ".join(plugin.owner or "this process" for plugin in self._candidates(name))
            raise NameTakenError(f"{self.kind} {name!r} is taken by {owners}; override=True replaces it here")

    def _plugins(self) -> dict[str, list[Plugin]]:
        with self._lock:
            if self._found is None:
                plugins, self._problems = discover(self.group)
                by_name: dict[str, list[Plugin]] = {}
                for plugin in sorted(plugins, key=lambda plugin: plugin.qualified):
                    by_name.setdefault(plugin.name, []).append(plugin)
                self._found = by_name
            return self._found

    def _candidates(self, name: str) -> list[Plugin]:
        owner, _, bare = name.rpartition(":")
        if bare in self._reserved and owner in ("", self._reserved[bare].distribution):
            return [self._reserved[bare]]
        if not owner and bare in self._registered:
            return [Plugin(bare, _place(self._registered[bare]), "", "")]
        named = self._plugins().get(bare, [])
        return [plugin for plugin in named if not owner or normalise(plugin.distribution) == normalise(owner)]

    def _pick(self, name: str) -> Plugin:
        if not isinstance(name, str):
            raise TypeError(f"the name of a {self.kind} is a string, got {name!r}")
        candidates = self._candidates(name)
        allowed = self._allowed(candidates)
        ours = [plugin for plugin in allowed if normalise(plugin.distribution) == OURS]
        if len(allowed) == 1 or len(ours) == 1:  # nobody else's installation takes a name of ours
            return (ours or allowed)[0]
        if allowed:
            owners = " and ".join(f"{plugin.owner} ({plugin.value})" for plugin in allowed)
            picks = [plugin.qualified for plugin in allowed]
            single = sorted(repr(pick) for pick in picks if picks.count(pick) == 1)
            way_out = f"ask for {' or '.join(single)}" if single else "only its author can settle that"
            raise AmbiguousPluginError(f"{self.kind} {name!r} is declared by {owners}; {way_out}")
        if candidates:
            raise DisabledPluginError(
                f"{_describe(self.kind, candidates[0])} is disabled by {self._denied(candidates[0])}"
            )
        raise UnknownPluginError(self._unknown(name))

    def _owner_of(self, name: str) -> str:
        """The distribution that a bare name picks; nothing where it picks none, or this process."""
        try:
            return self._pick(name).distribution
        except LookupError:
            return ""

    def _unknown(self, name: str) -> str:
        known = self.names()
        lower = {other.lower(): other for other in known}
        close = [lower[other] for other in get_close_matches(name.rpartition(":")[2].lower(), lower, n=3, cutoff=0.5)]
        hint = f"the closest are {', '.join(close)}" if close else f"there are {', '.join(known) or 'none'}"
        listing = _LISTINGS.get(self.kind, f"{self.group} is the group read")
        return f"no {self.kind} is called {name!r}; {hint}; {listing}"

    def _is_reserved(self, plugin: Plugin) -> bool:
        return plugin is self._reserved.get(plugin.name)

    def _is_timms(self, plugin: Plugin) -> bool:
        return self._is_reserved(plugin) and plugin.value == timm_losses.VALUE

    def _denied(self, plugin: Plugin) -> str | None:
        return denied(plugin) if plugin.distribution and not self._is_reserved(plugin) else None

    def _allowed(self, plugins: Sequence[Plugin]) -> list[Plugin]:
        return [plugin for plugin in plugins if not self._denied(plugin)]

    def _is_disabled(self, name: str) -> bool:
        return not self._allowed(self._candidates(name))

    def _every_name(self, filter: str | Sequence[str], exclude: str | Sequence[str]) -> list[str]:
        wanted, unwanted = _as_list(filter) or ["*"], _as_list(exclude)

        def hit(patterns: list[str], name: str) -> bool:
            return any(matches(pattern, plugin) for pattern in patterns for plugin in self._candidates(name))

        names = {*self._reserved, *self._registered, *self._plugins()}
        return sorted(name for name in names if hit(wanted, name) and not hit(unwanted, name))

    def _load(self, plugin: Plugin) -> Builder:
        if plugin in self._loaded:
            return self._loaded[plugin]
        try:
            builder = plugin.load()
            if not callable(builder):
                raise TypeError(f"a factory is a class or a function, {plugin.value} is {type(builder).__name__}")
        except KeyboardInterrupt:
            raise
        except MissingPackageError as error:
            self._failed[plugin] = str(error)
            raise BrokenPluginError(f"{_describe(self.kind, plugin)} cannot be used: {error}") from error
        except BaseException as error:  # SystemExit and pytest's Skipped are no Exception
            self._failed[plugin] = _reason(error)
            raise BrokenPluginError(f"{_describe(self.kind, plugin)} is broken: {_reason(error)}") from error
        self._failed.pop(plugin, None)
        self._loaded[plugin] = builder
        return builder

    def _state(self, plugin: Plugin) -> tuple[Status, str]:
        if self._is_timms(plugin):
            problem = timm_losses.problem()
            return ("broken", problem) if problem else ("timm", "")
        if not plugin.distribution:
            return "registered", ""
        if plugin in self._loaded:
            return "loaded", ""
        problem = self._failed.get(plugin) or _visible_problem(plugin)
        return ("broken", problem) if problem else ("available", "")

    def _summary(self, plugin: Plugin, status: Status) -> str:
        if self._is_timms(plugin):
            return timm_losses.SUMMARIES[plugin.name]
        if not plugin.distribution:
            return source.first_line(self._registered[plugin.name].__doc__)
        return "" if status == "broken" else source.summary(*plugin.parse())


def _describe(kind: str, plugin: Plugin) -> str:
    return f"{kind} {plugin.name!r} of {plugin.owner or 'this process'} ({plugin.value})"


def _visible_problem(plugin: Plugin) -> str:
    try:
        module, attr = plugin.parse()
    except ValueError as error:
        return str(error)
    try:
        return source.problem(module, attr)
    except Exception:  # a finder that cannot tell: asking for the plug-in will
        return ""


def _place(builder: Builder) -> str:
    inner = getattr(builder, "func", builder)  # a functools.partial has its name inside
    return f"{getattr(inner, '__module__', '?')}:{getattr(inner, '__qualname__', type(inner).__qualname__)}"


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _as_list(patterns: str | Sequence[str]) -> list[str]:
    return [p for p in ([patterns] if isinstance(patterns, str) else patterns) if p]
