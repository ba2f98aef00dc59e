"""Errors between a name and the loss, data set or command behind it."""


class PluginError(Exception):
    """Base of every error of the registry."""


class UnknownPluginError(PluginError, LookupError):
    """Nothing is registered under the name."""


class AmbiguousPluginError(PluginError, LookupError):
    """Several distributions declare the name, and the caller named none of them."""


class DisabledPluginError(PluginError, LookupError):
    """The name is kept out by ``TOPK_REGISTRY_PLUGINS`` or ``TOPK_REGISTRY_DISABLE``."""


class NameTakenError(PluginError, ValueError):
    """An in-process registration would hide another one."""


class BrokenPluginError(PluginError, RuntimeError):
    """The plug-in cannot be imported, is no factory, or failed while it built; the cause is chained."""
