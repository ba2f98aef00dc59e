"""``topk-registry gce-weights``: the weights that the loss gives to samples."""

from collections.abc import Sequence

from topk_registry.cli import ArgumentParser, within

LIKELIHOODS = (0.01, 0.1, 0.5, 0.9)


def main(argv: Sequence[str]) -> int:
    """Print how strongly generalised cross-entropy pulls at samples of different likelihoods."""
    parser = ArgumentParser(
        prog="topk-registry gce-weights",
        description="The weight p^q of a sample's gradient beside cross-entropy's, by the likelihood p of its label.",
    )
    parser.add_argument(
        "--q", type=within("[0, inf)"), nargs="+", default=[0.0, 0.3, 0.7, 1.0], help="default: 0 0.3 0.7 1"
    )
    args = parser.parse_args(argv)
    print("     p  " + "  ".join(f"q={q:<5g}" for q in args.q))
    for p in LIKELIHOODS:
        print(f"{p:6g}  " + "  ".join(f"{p**q:<7.3f}" for q in args.q))
    return 0
