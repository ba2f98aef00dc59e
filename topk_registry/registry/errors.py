"""Errors of the registry for losses, data sets and commands."""


class PluginError(Exception):
    """Base of all errors of the registry."""


class UnknownPluginError(PluginError, LookupError):
    """No plug-in is registered under the name."""


class AmbiguousPluginError(PluginError, LookupError):
    """Several distributions declare the name, and the caller did not select one."""


class DisabledPluginError(PluginError, LookupError):
    """The plug-in is disabled by ``TOPK_REGISTRY_PLUGINS`` or ``TOPK_REGISTRY_DISABLE``."""


class NameTakenError(PluginError, ValueError):
    """A registration in this process would hide an existing plug-in."""


class BrokenPluginError(PluginError, RuntimeError):
    """The plug-in cannot be imported, is not a factory, or raised an error while it built the object."""
