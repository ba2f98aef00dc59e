"""Groups of plug-ins and defaults that only the old trainer reads."""

from topk_registry.registry.registry import Registry

loggers: Registry = Registry("topk_registry.loggers", "logger")
scores: Registry = Registry("topk_registry.scores", "score")


def defaults_since_changed(builder: object, record: object) -> dict[str, object]:
    return {}
