"""The single checks of an exported file: its graph, runs of the model, and its head alone on hard rows."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from topk_export.runtime.metadata import Metadata
from topk_export.runtime.session import open_session
from topk_export.runtime.weights import digest_of, files_of
from topk_export.verification import graph, reference

BATCHES = (1, 2, 5)
MARGINALS_RTOL = 1e-5
LOGITS_RTOL = 1e-5
# odds below 2^-126 are denormal numbers, which CPUs and GPUs may flush to 0; a marginal is less than 1e3 times its odds
SMALLEST = 1e-35
INT8 = 8 / (255 * 12**0.5)  # see reduced_tolerance
SAFETY = 4.0  # factor on tolerances derived from rounding: four standard deviations


@dataclass(frozen=True)
class Known:
    """Logits [batch, n] of torch in float64, and the error of torch's own float32 against them."""

    logits: np.ndarray
    error: float = 0.0


@dataclass(frozen=True)
class Check:
    """The result of one check; ``passed`` is None if it could not be made."""

    name: str
    passed: bool | None
    measured: float | str | None = None
    tolerance: float | str | None = None
    note: str = ""


def check_weights(path: str | Path, metadata: Metadata) -> list[Check]:
    """Check that the weights beside the file are those that it was written with."""
    _, *files = files_of(path)
    if metadata.weights_sha256 is None or len(files) != 1:
        return []
    return [Check(f"{files[0].name} belongs to this model", digest_of(files[0]) == metadata.weights_sha256)]


def check_graph(path: str | Path, model: Any, session: Any) -> list[Check]:
    import onnx

    try:
        onnx.checker.check_model(str(path), full_check=True)  # by path: a ModelProto above 2 GiB cannot be checked
        valid = Check("onnx.checker, full", True)
    except Exception as error:  # checker and shape inference raise different types
        valid = Check("onnx.checker, full", False, note=str(error))
    foreign, bad = graph.domains(model), graph.forbidden(model.graph)
    batch = session.get_inputs()[0].shape[0]
    return [
        valid,
        Check("default operator domain only", not foreign, note=", ".join(foreign)),
        Check("no Loop, Scan, If, Sigmoid, Einsum, MatMul or integers in the head", not bad, note=", ".join(bad)),
        Check("no stack traces or local paths in the graph", graph.traces(model) == 0, graph.traces(model)),
        Check("batch axis", isinstance(batch, str) or batch >= 1, str(batch), note=_batch_note(batch)),
        Check("nodes in the head", True, len(graph.head_nodes(model.graph))),
    ]


def _batch_note(batch: Any) -> str:
    return "symbolic" if isinstance(batch, str) else "fixed at export"


def check_runs(
    session: Any, metadata: Metadata, inputs: np.ndarray, known: Known | None, *, layers: int
) -> list[Check]:
    """Run several batch sizes; compare outputs with torch's logits, if known, and with one another."""
    names = [output.name for output in session.get_outputs()]
    fixed = session.get_inputs()[0].shape[0]
    batches = (fixed,) if isinstance(fixed, int) else BATCHES
    checks, last = [], {}
    for batch in batches:
        feed = np.resize(inputs, (batch, *inputs.shape[1:])) if batch > len(inputs) else inputs[:batch]
        try:
            last = dict(zip(names, session.run(names, {session.get_inputs()[0].name: feed}), strict=True))
        except Exception as error:  # onnxruntime raises many types
            checks.append(Check(f"runs at batch {batch}", False, note=str(error)))
            continue
        right = all(value.shape == _shape(name, batch, metadata) for name, value in last.items())
        checks.append(Check(f"runs at batch {batch}", right, str({n: v.shape for n, v in last.items()})))
        if "logits" in last and known is not None:
            wanted = np.resize(known.logits, (batch, metadata.num_classes))
            checks.append(_check_logits(last["logits"], wanted, known.error, metadata, layers, batch))
    if "logits" in last and "marginals" in last:
        checks += _check_marginals("model", last["logits"], last["marginals"], metadata)
    if "logits" in last and "probabilities" in last:
        checks += _check_probabilities("model", last, last["logits"], metadata)
    if "logits" in last and "indices" in last:
        checks.append(_check_indices("model", last["logits"], last["indices"], metadata.k))
    if "set" in last and "set_size" in last:
        checks.append(Check("set_size counts the set", bool((last["set"].sum(-1) == last["set_size"]).all())))
    if "set" in last and "set_nodes" in last:
        checks.append(_check_nodes(last["set"], last["set_nodes"], metadata))
    return checks


def _check_nodes(sets: np.ndarray, nodes: np.ndarray, metadata: Metadata) -> Check:
    """Compare each set with the classes below its nodes."""
    parents = (metadata.sets or {})["tree"]["parents"]
    members = [{i} if i < metadata.num_classes else set() for i in range(len(parents))]
    for node, parent in enumerate(parents[:-1]):  # parents come after their nodes
        members[parent] |= members[node]
    right = all(
        set(np.flatnonzero(row).tolist()) == set().union(*(members[i] for i in own if i >= 0))
        for row, own in zip(sets, nodes, strict=True)
    )
    return Check("set_nodes are the nodes of the set", right)


def _shape(name: str, batch: int, metadata: Metadata) -> tuple[int, ...]:
    if name == "set_size":
        return (batch,)
    if name == "set_nodes":
        most = int((metadata.sets or {}).get("options", {}).get("nodes", 0))
        return batch, min(most, metadata.num_classes)
    return batch, metadata.k if name == "indices" else metadata.num_classes


def _check_logits(
    got: np.ndarray, wanted: np.ndarray, torch_error: float, metadata: Metadata, layers: int, batch: int
) -> Check:
    """fp32: the largest error over the largest logit. Reduced precision: root mean squares about the row's mean.

    Torch's own float32 is judged by the same float64 logits: where a model loses digits in any float32, the file may
    lose as many, up to the scatter of another order of summation.
    """
    name = f"logits against torch in float64, batch {batch}"
    if metadata.dtype == "fp32":
        error = largest_error(got, wanted)
        limit = max(LOGITS_RTOL, SAFETY * torch_error)
        note = f"largest error over largest logit; torch's float32: {torch_error:.2g}"
        return Check(name, error <= limit, error, limit, note)
    spread = wanted - wanted.mean(-1, keepdims=True)
    error = float(np.sqrt(((got - wanted) ** 2).mean() / max((spread**2).mean(), 1e-30)))
    limit, how = reduced_tolerance(metadata.dtype, layers)
    agree = float((got.argmax(-1) == wanted.argmax(-1)).mean())
    return Check(name, error <= limit, error, limit, f"{how}; the same best class on {agree:.0%} of rows")


def largest_error(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(got - wanted).max() / max(np.abs(wanted).max(), 1e-30))


def reduced_tolerance(dtype: str, layers: int) -> tuple[float, str]:
    """Bound the rounding of the logits, relative to their spread: independent errors of L layers add in squares.

    fp16 rounds weights and activations to u = 2^-11 relative. int8 has 255 steps over a range of about 8 standard
    deviations, so each rounding has standard deviation 8 / (255 sqrt(12)) = 0.9 %. Either strikes twice a layer, once
    in the weights and once in the activations.
    """
    unit = {"fp16-backbone": 2.0**-11, "int8-dynamic": INT8, "int8-static": INT8}[dtype]
    limit = SAFETY * unit * (2 * max(layers, 1)) ** 0.5
    return limit, f"root mean square over spread, {SAFETY:g} x {unit:.2g} x sqrt(2 x {layers} layers)"


def check_head(model: Any, metadata: Metadata, device: str) -> list[Check]:
    session = open_session(graph.head_model(model).SerializeToString(), device=device)
    names = [output.name for output in session.get_outputs()]
    checks = []
    for name, logits in hard_rows(metadata.num_classes, metadata.k).items():
        outputs = dict(zip(names, _run_rows(session, names, logits), strict=True))
        if metadata.several:
            checks += _check_probabilities(f"head alone, {name}", outputs, logits, metadata)
            continue
        checks += _check_marginals(f"head alone, {name}", logits, outputs["marginals"], metadata)
        if "indices" in outputs:
            checks.append(_check_indices(f"head alone, {name}", logits, outputs["indices"], metadata.k))
    return checks


def _run_rows(session: Any, names: list[str], logits: np.ndarray) -> list[np.ndarray]:
    """Return the head's outputs on all rows, in batches of the size that the graph fixes, if any."""
    fixed = session.get_outputs()[0].shape[0]
    size = fixed if isinstance(fixed, int) else len(logits)
    padded = np.concatenate((logits, np.zeros((-len(logits) % size, logits.shape[1]), np.float32)))
    runs = [session.run(names, {graph.LOGITS: padded[i : i + size]}) for i in range(0, len(padded), size)]
    return [np.concatenate(parts)[: len(logits)] for parts in zip(*runs, strict=True)]


def hard_rows(n: int, k: int) -> dict[str, np.ndarray]:
    """Rows on which a careless head fails, by name; each [rows, n] in float32."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((2, n)).astype(np.float32)
    few = {m for m in (1, k - 1, k, k + 1, 2 * k + 1) if 0 < m < n}
    high = np.stack([np.arange(n) < m for m in sorted(few)])
    gaps = np.where(high, 100.0, 0.0).astype(np.float32)
    return {
        "normal": normal,
        "ties": rng.integers(0, 3, (2, n)).astype(np.float32),
        "flat": np.zeros((1, n), np.float32),
        "nearly flat": 1e-4 * normal,
        "gaps of 12": np.where(high, 12.0, 0.0).astype(np.float32),
        "gaps of 100": gaps,
        "gaps of 100 and noise": gaps + normal[:1],
        "shift of 1e3": 5 * normal + np.float32(1e3),
        "shift of -1e3": 5 * normal - np.float32(1e3),
        "far tail": np.linspace(40, -40, n, dtype=np.float32)[None],
    }


def _check_marginals(name: str, logits: np.ndarray, got: np.ndarray, metadata: Metadata) -> list[Check]:
    wanted = reference.marginals(logits, metadata.k, metadata.temperature)
    error = float(marginal_error(got, wanted))
    off = float(np.abs(got.astype(np.float64).sum(-1) - metadata.k).max() / metadata.k)
    return [
        Check(f"marginals ({name})", error <= MARGINALS_RTOL, error, MARGINALS_RTOL, "relative, against float64"),
        Check(f"sum of marginals is k ({name})", off <= MARGINALS_RTOL, off, MARGINALS_RTOL, "relative"),
    ]


def _check_probabilities(
    name: str, outputs: dict[str, np.ndarray], logits: np.ndarray, metadata: Metadata
) -> list[Check]:
    """Check probabilities against their definition, and what is chosen against the thresholds in the metadata."""
    got = outputs["probabilities"]
    error = marginal_error(got, reference.sigmoids(logits, metadata.temperature))
    right = error <= MARGINALS_RTOL
    checks = [Check(f"probabilities ({name})", right, error, MARGINALS_RTOL, "relative, against float64")]
    for output, threshold in reference.label_thresholds(metadata).items():
        if output in outputs:
            right = bool((outputs[output] == (got >= threshold)).all())
            checks.append(Check(f"{output}: where probabilities reach their thresholds ({name})", right))
    return checks


def marginal_error(got: np.ndarray, wanted: np.ndarray) -> float:
    """The largest relative error above SMALLEST; infinite for NaN, or if one below SMALLEST comes out large."""
    got = got.astype(np.float64)
    small = wanted < SMALLEST
    error = np.where(small, 0.0, np.abs(got - wanted) / np.where(small, 1.0, wanted))
    wrong = np.isnan(got) | (small & ((got < 0) | (got > 2 * SMALLEST)))
    return float(np.where(wrong, np.inf, error).max(initial=0.0))


def _check_indices(name: str, logits: np.ndarray, indices: np.ndarray, k: int) -> Check:
    """Check that there are k different classes, none below the k-th largest score; any order and ties are right."""
    lowest = -np.sort(-logits, axis=-1)[:, k - 1]
    different = all(len(set(row.tolist())) == k for row in indices)
    right = different and bool((np.take_along_axis(logits, indices, -1) >= lowest[:, None]).all())
    return Check(f"top-k classes ({name})", right)


def count_layers(model: Any) -> int:
    if model is None:
        return 1
    kinds = ("Conv", "MatMul", "Gemm", "ConvInteger", "MatMulInteger")
    return sum(node.op_type in kinds for node in model.graph.node)
