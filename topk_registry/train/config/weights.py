"""Flags of class weights that belong together; needs neither torch nor timm."""

METHODS = ("inv_freq", "effective_num")  # timm's methods for class weights

# the settings of a method, with timm's defaults and the methods that read them
SETTINGS: dict[str, tuple[float | None, tuple[str, ...]]] = {
    "loss_weight_power": (1.0, ("inv_freq",)),
    "loss_weight_beta": (0.999, ("effective_num",)),
    "loss_weight_max": (None, METHODS),
}


def idle_setting(class_weight: str, **settings: float | None) -> str:
    """Say which setting of a method is given without the method; empty where none is."""
    for name, (default, methods) in SETTINGS.items():
        if settings[name] != default and class_weight not in methods:
            flag = "--" + name.replace("_", "-")
            return (
                f"{flag} {settings[name]} has no effect: it is for --class-weight {' or '.join(methods)}, got "
                f"{class_weight or 'none'}"
            )
    return ""
