"""Flags of samplers that belong together; needs neither torch nor timm."""

SAMPLERS = ("instance", "class_balanced", "sqrt", "effective_num", "repeat_factor")

# the settings of a sampler: their defaults, and the sampler that reads them
SETTINGS: dict[str, tuple[float, str]] = {
    "sampler_beta": (0.999, "effective_num"),
    "sampler_threshold": (0.001, "repeat_factor"),
}


def sampler_of(sampler: str | None, retrain_head: str) -> str:
    """The sampler of a run: the given one, else class-balanced where only the classifier is trained."""
    return sampler or ("class_balanced" if retrain_head else "instance")


def sampler_problem(sampler: str, aug_repeats: float, **settings: float) -> str:
    """Say which settings of a sampler exclude each other; empty where none do."""
    for name, (default, reader) in SETTINGS.items():
        if settings[name] != default and sampler != reader:
            return f"--{name.replace('_', '-')} {settings[name]} is for --sampler {reader}, got {sampler}"
        if not 0.0 < settings[name] < 1.0:
            return f"--{name.replace('_', '-')} must be above 0 and below 1, got {settings[name]}"
    if sampler != "instance" and aug_repeats:
        return f"--sampler {sampler} and --aug-repeats both say how often an image comes: leave one out"
    return ""
