"""Flags of class weights that belong together; needs neither torch nor timm."""

METHODS = ("inv_freq", "effective_num")  # timm's methods for class weights
POSITIVE_METHODS = ("neg_pos",)  # timm's methods for weights of the positive term
FLAGS = {"class_weight": METHODS, "loss_pos_weight": POSITIVE_METHODS}

# the settings of a method, with timm's defaults and the methods that read them
SETTINGS: dict[str, tuple[float | None, tuple[str, ...]]] = {
    "loss_weight_power": (1.0, ("inv_freq", "neg_pos")),
    "loss_weight_beta": (0.999, ("effective_num",)),
    "loss_weight_max": (None, (*METHODS, *POSITIVE_METHODS)),
}


def idle_setting(class_weight: str, loss_pos_weight: str = "", **settings: float | None) -> str:
    """Say which setting of a method is given without the method; empty where none is."""
    given = {"class_weight": class_weight, "loss_pos_weight": loss_pos_weight}
    for name, (default, methods) in SETTINGS.items():
        if settings[name] != default and not {*given.values()} & {*methods}:
            readers = [
                f"{_spelt(flag)} {' or '.join(own)}" for flag, known in FLAGS.items()
                if (own := [method for method in known if method in methods])
            ]  # fmt: skip
            got = " ".join(f"{_spelt(flag)} {value}" for flag, value in given.items() if value)
            return (
                f"{_spelt(name)} {settings[name]} has no effect: it is for {' or '.join(readers)}, got {got or 'none'}"
            )
    return ""


def _spelt(name: str) -> str:
    return "--" + name.replace("_", "-")
