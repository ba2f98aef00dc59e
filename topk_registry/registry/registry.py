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
from topk_registry.registry.discovery import OURS, Plugin, denied, discover, matches, misspelt_groups, normalise
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


@dataclass(frozen=True)
class LossInfo:
    """Owner, version, status and summary of a loss, data set or command, without importing it.

    ``status`` is ``available`` (found, not imported), ``loaded`` (imported by this process), ``registered`` (by this
    process's own code), ``timm`` (timm's own), or ``broken``, ``ambiguous`` or ``disabled``; ``error`` then says why. A
    plug-in that fails only on import is known to be broken after the first attempt.
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
        group: the entry-point group.
        kind: what a name stands for, for messages: ``loss``, ``dataset``, ``command``, ``model file``.
        reserved: names that no plug-in can take and that no environment variable disables.
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
        """Return a line for each installed distribution whose metadata cannot be read."""
        self._plugins()
        return list(self._problems)

    def plugins(self) -> list[Plugin]:
        """Return every declaration that was found, disabled ones too."""
        return [plugin for owners in self._plugins().values() for plugin in owners]

    def shadowed(self) -> list[Plugin]:
        """Return the plug-ins whose bare name belongs to another owner; ``distribution:name`` reaches them."""
        found = []
        for plugin in self._allowed(self.plugins()):
            try:
                owner = self._pick(plugin.name).distribution
            except LookupError:
                continue
            if normalise(owner) != normalise(plugin.distribution):
                found.append(plugin)
        return found

    def names(self, filter: str | Sequence[str] = "", *, exclude: str | Sequence[str] = "") -> list[str]:
        """Return the sorted names that match, broken and ambiguous ones too, without disabled ones."""
        return [name for name in self._every_name(filter, exclude) if name in self]

    def infos(self, filter: str | Sequence[str] = "", *, exclude: str | Sequence[str] = "") -> list[LossInfo]:
        """Describe every name that matches, disabled ones too, and shadowed ones as ``distribution:name``."""
        wanted, unwanted = _as_list(filter) or ["*"], _as_list(exclude)
        names = self._every_name(filter, exclude)
        for plugin in self.shadowed():
            hit = any(matches(p, plugin) for p in wanted) and not any(matches(p, plugin) for p in unwanted)
            names += [plugin.qualified] * hit
        return [self.info(name) for name in sorted(names, key=lambda name: (name.rpartition(":")[2], name))]

    def info(self, name: str) -> LossInfo:
        """Describe a name without importing it."""
        try:
            plugin = self._pick(name)
        except (AmbiguousPluginError, DisabledPluginError) as error:
            status: Status = "ambiguous" if isinstance(error, AmbiguousPluginError) else "disabled"
            candidates = self._candidates(name)
            owners = ", ".join(plugin.distribution for plugin in self._allowed(candidates) or candidates)
            return LossInfo(name, owners, "", "", status, str(error), "")
        status, error, summary = self._state(plugin)
        return LossInfo(name, plugin.distribution, plugin.version, plugin.value, status, error, summary)

    def declares(self, name: str, attribute: str) -> bool:
        """Return whether the factory declares ``attribute = True``, read from its source if it is not loaded."""
        plugin = self._pick(name)
        loaded = self._loaded.get(plugin) if plugin.distribution else self._registered[plugin.name]
        if loaded is not None:
            return getattr(unbound(loaded), attribute, False) is True
        return not self._is_timms(plugin) and source.declares(*plugin.parse(), attribute)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and bool(self._allowed(self._candidates(name)))

    def builder(self, name: str) -> Builder:
        """Return the factory behind a name. This imports its plug-in, which runs the plug-in's code.

        Raises:
            UnknownPluginError, AmbiguousPluginError, DisabledPluginError: the name picks no single plug-in.
            BrokenPluginError: the plug-in cannot be imported or is no factory; the cause is chained.
        """
        plugin = self._pick(name)
        if self._is_timms(plugin):
            return timm_losses.builder(plugin.name)
        return self._load(plugin) if plugin.distribution else self._registered[plugin.name]

    def create(self, name: str, **options: Any) -> Any:
        """Call the factory behind a name with these options; errors as in :meth:`build`."""
        return self.build(name, self.builder(name), options)

    def build(self, name: str, factory: Builder, options: Mapping[str, Any]) -> Any:
        """Call a factory.

        Raises:
            TypeError: the factory does not take an option, or misses one.
            TypeError, ValueError: raised by the factory; a failed assertion becomes a ValueError if there are options.
            BrokenPluginError: the factory failed in another way.
        """
        check_options(f"{self.kind} {name!r}", factory, options)
        try:
            return factory(**options)
        except (TypeError, ValueError, BrokenPluginError, KeyboardInterrupt):
            raise
        except BaseException as error:  # SystemExit of a factory must not end a training run
            if options and isinstance(error, AssertionError):
                pairs = ", ".join(f"{option}={value!r}" for option, value in options.items())
                reason = str(error) or (traceback.extract_tb(error.__traceback__)[-1].line or "an assertion").strip()
                raise ValueError(f"{self.describe(name)} does not accept {pairs}: {reason}") from error
            hint = "; call super().__init__() first" if "before Module.__init__" in str(error) else ""
            raise BrokenPluginError(f"{self.describe(name)} cannot be built: {_reason(error)}{hint}") from error

    def describe(self, name: str) -> str:
        """Return kind, name, owner and value, for messages."""
        return self._describe(self._pick(name))

    def register(self, name: str, *, override: bool = False) -> Callable[[B], B]:
        """Return a decorator that registers a factory under a name in this process; see :func:`register_loss`."""
        if not isinstance(name, str):
            raise TypeError(f"the name of a {self.kind} is a string, as in @register_{self.kind}('mine'), got {name!r}")
        if not name or any(c in ":*?[]," or c.isspace() for c in name):
            raise ValueError(f"the name of a {self.kind} contains no space, colon, comma or wildcard, got {name!r}")

        def decorate(builder: B) -> B:
            if problem := _no_factory(builder):
                raise TypeError(f"{self.kind} {name!r}: {problem}")
            with self._lock:
                if name in self._reserved:
                    owner, names = self._reserved[name].distribution, ", ".join(self._reserved)
                    raise NameTakenError(f"{name!r} is one of {owner}'s names ({names}): choose another")
                if not override and name in self and self._registered.get(name) is not builder:
                    owners = ", ".join(plugin.owner or "this process" for plugin in self._candidates(name))
                    raise NameTakenError(f"{self.kind} {name!r} is taken by {owners}; override=True replaces it here")
                self._registered[name] = builder
            return builder

        return decorate

    def unregister(self, name: str) -> None:
        """Remove a registration of this process; a plug-in that it hid is visible again."""
        with self._lock:
            if self._registered.pop(name, None) is None:
                raise UnknownPluginError(f"this process has registered no {self.kind} {name!r}")

    def _plugins(self) -> dict[str, list[Plugin]]:
        with self._lock:
            if self._found is None:
                plugins, self._problems = discover(self.group)
                self._found = {}
                for plugin in sorted(plugins, key=lambda plugin: plugin.qualified):
                    self._found.setdefault(plugin.name, []).append(plugin)
            return self._found

    def _candidates(self, name: str) -> list[Plugin]:
        owner, _, bare = name.rpartition(":")
        if bare in self._reserved and normalise(owner) in ("", normalise(self._reserved[bare].distribution)):
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
        if len(allowed) == 1 or len(ours) == 1:  # no other distribution takes a name of ours
            return (ours or allowed)[0]
        if allowed:
            owners = " and ".join(f"{plugin.owner} ({plugin.value})" for plugin in allowed)
            picks = [plugin.qualified for plugin in allowed]
            single = sorted(repr(pick) for pick in picks if picks.count(pick) == 1)
            remedy = f"ask for {' or '.join(single)}" if single else "only its author can fix that"
            raise AmbiguousPluginError(f"{self.kind} {name!r} is declared by {owners}; {remedy}")
        if candidates:
            variable = self._denied(candidates[0])
            raise DisabledPluginError(f"{self._describe(candidates[0])} is disabled by {variable}")
        raise UnknownPluginError(self._unknown(name))

    def _unknown(self, name: str) -> str:
        bare = name.rpartition(":")[2]
        for message, entries in misspelt_groups():
            if bare in [entry.name for entry in entries]:
                return f"no {self.kind} is called {name!r}; {message} `topk-registry doctor` checks all plug-ins"
        lower = {other.lower(): other for other in self.names()}
        close = [lower[other] for other in get_close_matches(bare.lower(), lower, n=3, cutoff=0.5)]
        hint = f"the closest are {', '.join(close)}" if close else f"there are {', '.join(self.names()) or 'none'}"
        listing = {"loss": "; `topk-registry losses` lists all", "command": "; `topk-registry --help` lists all"}
        return f"no {self.kind} is called {name!r}; {hint}{listing.get(self.kind, '')}"

    def _is_reserved(self, plugin: Plugin) -> bool:
        return plugin is self._reserved.get(plugin.name)

    def _is_timms(self, plugin: Plugin) -> bool:
        return self._is_reserved(plugin) and plugin.value == timm_losses.VALUE

    def _denied(self, plugin: Plugin) -> str | None:
        return denied(plugin) if plugin.distribution and not self._is_reserved(plugin) else None

    def _allowed(self, plugins: Sequence[Plugin]) -> list[Plugin]:
        return [plugin for plugin in plugins if not self._denied(plugin)]

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
            builder: Any = plugin.load()
            if problem := _no_factory(builder):
                raise TypeError(problem)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit and pytest's Skipped are no Exception
            missing = isinstance(error, MissingPackageError)
            self._failed[plugin] = str(error) if missing else _reason(error)
            verb = "cannot be used" if missing else "is broken"
            raise BrokenPluginError(f"{self._describe(plugin)} {verb}: {self._failed[plugin]}") from error
        self._failed.pop(plugin, None)
        self._loaded[plugin] = builder
        return builder

    def _state(self, plugin: Plugin) -> tuple[Status, str, str]:
        """Status, error and summary."""
        if self._is_timms(plugin):
            problem = timm_losses.problem()
            return "broken" if problem else "timm", problem, timm_losses.SUMMARIES[plugin.name]
        if not plugin.distribution:
            return "registered", "", source.first_line(self._registered[plugin.name].__doc__)
        problem = "" if plugin in self._loaded else self._failed.get(plugin) or _visible_problem(plugin)
        if problem:
            return "broken", problem, ""
        return "loaded" if plugin in self._loaded else "available", "", source.summary(*plugin.parse())

    def _describe(self, plugin: Plugin) -> str:
        return f"{self.kind} {plugin.name!r} of {plugin.owner or 'this process'} ({plugin.value})"


def _no_factory(builder: Any) -> str:
    """Why an object is no factory, or nothing."""
    kind = type(builder)
    if any(base.__module__.startswith("torch.nn.modules") for base in kind.__mro__):
        return f"expected a class or a function that returns a loss, got an instance of {kind.__name__}"
    return "" if callable(builder) else f"expected a class or a function, got {kind.__name__}"


def _visible_problem(plugin: Plugin) -> str:
    try:
        module, attr = plugin.parse()
    except ValueError as error:
        return str(error)
    try:
        return source.problem(module, attr)
    except Exception:  # an unusual finder; loading the plug-in will tell
        return ""


def _place(builder: Builder) -> str:
    inner = unbound(builder)
    return f"{getattr(inner, '__module__', '?')}:{getattr(inner, '__qualname__', type(inner).__qualname__)}"


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _as_list(patterns: str | Sequence[str]) -> list[str]:
    return [p for p in ([patterns] if isinstance(patterns, str) else patterns) if p]
