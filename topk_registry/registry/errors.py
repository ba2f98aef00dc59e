"""Exceptions that the registries of losses, data sets, commands and model files raise."""


class PluginError(Exception):
    """Base class of all exceptions about plug-ins."""


class UnknownPluginError(PluginError, LookupError):
    """No plug-in has the requested name."""


class AmbiguousPluginError(PluginError, LookupError):
    """Several distributions have a plug-in with the requested name. ``distribution:name`` selects one of them."""


class DisabledPluginError(PluginError, LookupError):
    """The environment variable ``TOPK_REGISTRY_PLUGINS`` or ``TOPK_REGISTRY_DISABLE`` disables the plug-in."""


class NameTakenError(PluginError, ValueError):
    """The name of a new plug-in already belongs to another plug-in."""


class BrokenPluginError(PluginError, RuntimeError):
    """The plug-in cannot be imported, is neither a class nor a function, or creates no callable loss."""
