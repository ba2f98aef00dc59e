"""Findings of the theory study: which minimisers rank the top k, the limit, the bound, the ceiling and sparsity."""

from collections.abc import Mapping, Sequence
from typing import Any

from topk_studies.engine.study import Findings, Note, Record, Table, Value

POSTERIORS: tuple[dict[str, Any], ...] = (
    {"case": "three", "k": 2, "posterior": [0.4, 0.35, 0.25]},
    {"case": "four", "k": 2, "posterior": [0.31, 0.29, 0.21, 0.19]},
    {"case": "even steps", "k": 2, "posterior": [0.3, 0.25, 0.2, 0.15, 0.1]},
    {"case": "one class", "k": 2, "posterior": [0.9, 0.04, 0.03, 0.02, 0.01]},
    {"case": "nearly flat", "k": 2, "posterior": [0.21, 0.205, 0.2, 0.195, 0.19]},
    {"case": "ten, k = 5", "k": 5, "posterior": [0.19, 0.17, 0.15, 0.13, 0.11, 0.09, 0.07, 0.05, 0.03, 0.01]},
    {
        "case": "ten, heavy tail",
        "k": 3,
        "posterior": [0.13, 0.12, 0.11, 0.105, 0.1, 0.095, 0.09, 0.085, 0.085, 0.08],
    },
)
SPARSITY = {"B": 200, "n": 100, "k": 5, "share": 0.99}
LIMIT_SHAPES = ({"B": 200, "n": 50, "k": 1}, {"B": 200, "n": 50, "k": 5}, {"B": 200, "n": 1000, "k": 5})
LIMIT_TAUS = (1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-8)
BOUND_SHAPES = ({"B": 1000, "n": 10}, {"B": 1000, "n": 1000})
BOUND_SCALES = (0.1, 1.0, 3.0, 10.0)
CEILING_LOSSES = ("log_spherical_softmax", "log_taylor_softmax")
CEILING_SHAPES = ({"n": 100, "d": 8}, {"n": 1000, "d": 8}, {"n": 1000, "d": 32})

FLAT = 1e-6  # a gradient above this at the end of a descent leaves the case undecided
TIE = 1e-8  # a smaller gap to the border is none
ROUNDING = 1e-9
ByLoss = dict[str, dict[str, dict[str, Any]]]  # loss, case


def findings(records: Sequence[Record]) -> Findings:
    calibration = _by_loss(records, "calibration", "case")
    sparsity = {r.configuration["loss"]: r.result for r in records if r.configuration["check"] == "sparsity"}
    others = {
        check: [(r.configuration, r.result) for r in records if r.configuration["check"] == check]
        for check in ("limit", "bound", "ceiling")
    }
    return Findings(
        tables=(
            _calibration_table(calibration),
            _sparsity_table(sparsity),
            _table(
                "The smooth top-k SVM less the hinge that it smooths",
                others["limit"],
                {"n": "n", "k": "k", "tau": "tau"},
                {"difference": "largest difference", "bound": "tau log C(n, k)"},
            ),
            _table(
                "The spherical bound less cross-entropy",
                others["bound"],
                {"n": "n", "scale": "deviation of the scores"},
                {"least": "least", "mean": "mean", "greatest": "greatest"},
            ),
            _table(
                "The sum over classes of their largest probability",
                others["ceiling"],
                {"loss": "loss", "n": "n", "d": "d"},
                {"sum": "by eigenvalues", "reached": "reached by features"},
            ),
        ),
        notes=_notes(calibration, sparsity, others),
        protocol=(
            "Conditional risks in double precision, every loss at its defaults, equal class counts. A descent ends "
            f"where no entry of the gradient is above 1e-8, and a result counts where none is above {FLAT:g}. "
            "Gradients are counted on 200 rows of standard normal scores, n = 100, k = 5. Random layers have normal "
            "weights of deviation 1 / sqrt(d)."
        ),
        commands=(("From four times as many starts:", "topk-registry study theory --budget paper"),),
    )


def _by_loss(records: Sequence[Record], check: str, key: str) -> ByLoss:
    by_loss: ByLoss = {}
    for record in records:
        c = record.configuration
        if c["check"] == check:
            by_loss.setdefault(c["loss"], {})[c[key]] = record.result
    return by_loss


def verdict(result: dict[str, Any]) -> str:
    """Read a calibration result: ranked, tie, wrong, undecided, or why there is none of these."""
    if "problem" in result:
        return result["problem"] if result["problem"] == "it is random" else "cannot be asked"
    if result["slope"] > FLAT:
        return "undecided"
    if abs(result["gap"]) <= TIE or abs(result["ahead"]) <= TIE:
        return "tie"
    return "ranked" if result["ahead"] > 0 and result["gap"] > 0 else "wrong"


def _calibration_table(by_loss: ByLoss) -> Table:
    cases = [case["case"] for case in POSTERIORS]
    rows = [
        (loss, *(verdict(results[c]) if c in results else None for c in cases)) for loss, results in by_loss.items()
    ]
    return Table(
        "Does the minimiser of the conditional risk rank the true top k?",
        ("loss", *cases),
        tuple(rows),
        note="ranked: every minimum found puts the k likeliest classes first, and the border costs more; tie: the "
        "border costs no more; wrong: a minimum of least risk ranks another class among the first k; undecided: the "
        "descent ends where the gradient is not 0, as at the minimum of a loss with kinks; it is random: the loss "
        "draws noise.",
    )


def _sparsity_table(sparsity: dict[str, dict[str, Any]]) -> Table:
    rows = [(loss, one["nonzero"], one["most"]) for loss, one in sparsity.items() if "problem" not in one]
    return Table(
        "Scores of a row that have a gradient, of 100",
        ("loss", "not zero", "carry 99 % of it"),
        tuple((loss, round(nonzero, 1), round(most, 1)) for loss, nonzero, most in rows),
    )


Runs = Sequence[tuple[dict[str, Any], dict[str, Any]]]


def _table(title: str, runs: Runs, settings: dict[str, str], numbers: dict[str, str]) -> Table:
    def row(configuration: dict[str, Any], result: dict[str, Any]) -> tuple[Value, ...]:
        return (*(configuration[key] for key in settings), *(f"{result[key]:.4g}" for key in numbers))

    rows = tuple(row(*run) for run in runs if "problem" not in run[1])
    return Table(title, (*settings.values(), *numbers.values()), rows)


def _notes(calibration: ByLoss, sparsity: dict[str, dict[str, Any]], others: Mapping[str, Runs]) -> tuple[Note, ...]:
    notes = []
    for loss, results in calibration.items():
        if loss in ("ce", "smooth_topk_svm", "topk_nll", "log_spherical_softmax", "log_taylor_softmax"):
            verdicts = {case: verdict(result) for case, result in results.items()}
            missed = [f"{case} ({outcome})" for case, outcome in verdicts.items() if outcome != "ranked"]
            notes.append(
                Note(
                    f"The minimiser of {loss} ranks the true top k.",
                    "differs" if missed else "agrees",
                    f"On {len(verdicts) - len(missed)} of {len(verdicts)} posteriors"
                    + (f"; not on {', '.join(missed)}." if missed else "."),
                    beyond=True,
                )
            )
    dense = [name for name in ("ce", "smooth_topk_svm") if name in sparsity]
    if "noised_topk" in sparsity and dense:
        noised, rivals = sparsity["noised_topk"]["nonzero"], {name: sparsity[name]["nonzero"] for name in dense}
        notes.append(
            Note(
                "The noised loss's gradient is sparse, those of cross-entropy and of the smooth top-k SVM are not.",
                "agrees" if noised < 10 and min(rivals.values()) > 99 else "differs",
                f"Of 100 scores {noised:.1f} have a gradient under noised_topk at its defaults; the paper has 4 in "
                "training. " + ", ".join(f"{name}: {many:.1f}" for name, many in rivals.items()) + ".",
            )
        )
    if others["limit"]:
        within = all(one["difference"] <= one["bound"] + ROUNDING for _, one in others["limit"])
        coldest = [one["difference"] for c, one in others["limit"] if c["tau"] == min(LIMIT_TAUS)]
        notes.append(
            Note(
                "As tau falls the smooth top-k SVM becomes the top-k SVM, within tau log C(n, k).",
                "agrees" if within and max(coldest) < ROUNDING else "differs",
                f"The largest difference at tau = {min(LIMIT_TAUS):g} is {max(coldest):.1e}.",
            )
        )
    if others["bound"]:
        least = min(one["least"] for _, one in others["bound"])
        notes.append(
            Note(
                "The spherical bound is never below cross-entropy.",
                "agrees" if least >= -ROUNDING else "differs",
                f"The least difference is {least:.2g}, on {sum(c['B'] for c, _ in others['bound'])} rows.",
                beyond=True,
            )
        )
    if ceiling := [(c, one) for c, one in others["ceiling"] if "problem" not in one]:
        below = all(one["sum"] <= c["d"] + 1 + ROUNDING for c, one in ceiling)
        reached = all(abs(one["reached"] - one["sum"]) <= 1e-4 * one["sum"] for _, one in ceiling)
        notes.append(
            Note(
                "Under a spherical or Taylor softmax the largest probabilities of all classes sum to at most d + 1.",
                "agrees" if below and reached else "differs",
                "By eigenvalues, and reached by features: "
                + ", ".join(f"{one['sum']:.2f} at d = {c['d']}, n = {c['n']}" for c, one in ceiling)
                + ". A softmax has no such ceiling: the sum may be n.",
                beyond=True,
            )
        )
    return tuple(notes)
