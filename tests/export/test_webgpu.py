"""Exported files on onnxruntime's WebGPU provider: placement of all nodes, and results against float64 definitions."""

import numpy as np
import onnx
import pytest

from tests.export.test_exact import RECIPE, bare_head
from topk_export import DeviceError, Predictor, graph, verify_file
from topk_export.nodes import add_sets
from topk_export.runtime.metadata import LOGITS, Metadata
from topk_export.runtime.session import device_of, open_session
from topk_export.verify import expected_sets, marginals
from topk_registry.conformal import PredictionSets, Score

pytestmark = pytest.mark.usefixtures("software_gpu")

LEVELS, THRESHOLDS = (0.1, 0.2), {"lac": (0.99, 0.9), "raps": (0.95, 0.8)}
ON_CPU = {"Shape", "Concat"}  # the CPU may compute shapes


def with_sets(model: onnx.ModelProto, score: str = "raps") -> onnx.ModelProto:
    return add_sets(model, PredictionSets(Score(score), LEVELS, np.asarray(THRESHOLDS[score])[:, None], 0.1))


def head(n: int, k: int, score: str = "raps") -> onnx.ModelProto:
    return with_sets(bare_head(Metadata(k, 1.0, n, tuple(map(str, range(n))), RECIPE)), score)


def placed(session) -> dict[str, set[str]]:
    """Return the types of nodes per provider."""
    found: dict[str, set[str]] = {}
    for part in session.get_provider_graph_assignment_info():
        found.setdefault(part.ep_name, set()).update(node.op_type for node in part.get_nodes())
    return found


def rows(batch: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return logits, a class list per row, and alpha per row. The list of the first row has k classes."""
    rng = np.random.default_rng(batch * n)
    logits = 3 * rng.standard_normal((batch, n)).astype(np.float32)
    allowed = rng.random((batch, n)) < 0.7
    allowed[:, : k + 2] = True
    allowed[0] = np.arange(n) < k
    alpha = np.where(np.arange(batch) % 2, 0.2, 0.1).astype(np.float32)
    return logits, allowed, alpha


def check(outputs: dict[str, np.ndarray], allowed: np.ndarray, alpha: np.ndarray, k: int, score: str) -> None:
    logits = outputs[LOGITS]
    masked = np.where(allowed, logits.astype(np.float64), -np.inf)
    checked = slice(0, 4)  # the definition of marginals takes long
    np.testing.assert_allclose(outputs["marginals"][checked], marginals(masked[checked], k), rtol=0, atol=1e-5)
    shares = np.exp(masked - masked.max(-1, keepdims=True))
    np.testing.assert_allclose(outputs["probabilities"], shares / shares.sum(-1, keepdims=True), rtol=0, atol=1e-6)
    np.testing.assert_array_equal(outputs["indices"], np.argsort(-masked, axis=-1, kind="stable")[:, :k])
    for row in range(len(logits)):
        limit = np.asarray(THRESHOLDS[score], np.float32)[[0 if alpha[row] < 0.15 else 1]]
        sets = {"score": score, "options": {}}
        wanted, close = expected_sets(logits[row : row + 1], sets, limit, allowed[row : row + 1])
        assert close.sum() <= 2  # classes whose score is at the threshold up to rounding
        np.testing.assert_array_equal(outputs["set"][row][~close[0]], wanted[~close])
    np.testing.assert_array_equal(outputs["set_size"], outputs["set"].sum(-1))


def run(session, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feed), strict=True))


SHAPES = [(1, 10, 1), (7, 10, 5), (64, 10, 5), (7, 1000, 5)]
LARGE = [(64, 1000, 5), (7, 1000, 50), (7, 21_841, 5), (1, 21_841, 50)]
AT_NIGHT = [(1, 1000, 50), (1, 21_841, 1), (64, 21_841, 5)]


@pytest.mark.parametrize(
    ("batch", "n", "k", "score"),
    [
        (7, 10, 5, "lac"),
        *((*shape, "raps") for shape in SHAPES),
        *(pytest.param(*shape, "raps", marks=pytest.mark.slow) for shape in LARGE),
        *(pytest.param(*shape, "raps", marks=pytest.mark.nightly) for shape in AT_NIGHT),
        pytest.param(7, 1000, 5, "lac", marks=pytest.mark.nightly),
    ],
)
def test_all_outputs(batch, n, k, score):
    session = open_session(head(n, k, score).SerializeToString(), device="webgpu")
    assert device_of(session) == "webgpu"
    assert placed(session).get("CPUExecutionProvider", set()) <= ON_CPU
    logits, allowed, alpha = rows(batch, n, k)
    check(run(session, {"input": logits, "allowed": allowed, "alpha": alpha}), allowed, alpha, k, score)
    every = np.ones_like(allowed)
    check(run(session, {"input": logits}), every, np.full(batch, 0.1), k, score)


@pytest.mark.parametrize("k", [1, 5, 8])
def test_rows_without_a_distribution_are_nan(k):
    session = open_session(head(10, k).SerializeToString(), device="webgpu")
    logits = np.random.default_rng(0).standard_normal((4, 10)).astype(np.float32)
    logits[0, 3], logits[1, 2], logits[2] = np.nan, np.inf, -np.inf
    outputs = run(session, {"input": logits})
    for name in ("marginals", "probabilities"):
        assert np.isnan(outputs[name][:3]).all(), name
        assert np.isfinite(outputs[name][3]).all(), name


@pytest.mark.slow
def test_scores_of_minus_infinity_from_the_backbone():
    session = open_session(head(10, 5).SerializeToString(), device="webgpu")
    logits = rows(7, 10, 5)[0]
    finite = np.arange(10) < np.arange(3, 10)[:, None]
    logits[~finite] = -np.inf
    outputs = run(session, {"input": logits})
    np.testing.assert_allclose(outputs["marginals"], marginals(logits, 5), rtol=0, atol=1e-5)
    known = np.argsort(-logits, axis=-1, kind="stable")[:, :5]
    wanted = np.where(np.take_along_axis(finite, known, -1), known, -1)
    np.testing.assert_array_equal(outputs["indices"], wanted)


@pytest.mark.slow
def test_an_exported_network_passes_its_verification(export):
    report = verify_file(export(10, k=5), device="webgpu")
    assert report["device"] == "webgpu"
    assert [check for check in report["checks"] if not check["passed"]] == []


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 64])
def test_an_exported_network_with_sets(export, batch):
    model = with_sets(graph.load(export(10, k=5)))
    session = open_session(model.SerializeToString(), device="webgpu")
    assert placed(session).get("CPUExecutionProvider", set()) <= ON_CPU
    _, allowed, alpha = rows(batch, 10, 5)
    images = np.random.default_rng(batch).standard_normal((batch, 3, 8, 8)).astype(np.float32)
    outputs = run(session, {"input": images, "allowed": allowed, "alpha": alpha})
    check(outputs, allowed, alpha, 5, "raps")
    on_cpu = run(open_session(model.SerializeToString(), device="cpu"), {"input": images})
    np.testing.assert_allclose(outputs[LOGITS], on_cpu[LOGITS], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_half_precision_needs_a_gpu_with_f16(export):
    # SwiftShader has no f16
    with pytest.raises(DeviceError, match="f16 but the device does not support it"):
        Predictor(export(10, k=5, dtype="fp16"), device="webgpu")
