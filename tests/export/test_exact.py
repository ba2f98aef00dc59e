"""The head of an exported file against 50-digit arithmetic and against its rules for excluded classes."""

from decimal import Decimal, localcontext

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from topk_export.graph import forbidden
from topk_export.head import add_head
from topk_export.nodes import add_sets
from topk_export.runtime.metadata import LOGITS, OUTPUTS, Metadata
from topk_export.runtime.preprocess import Preprocess
from topk_export.verify import SMALLEST, class_lists, hard_rows, marginals
from topk_registry.conformal import PredictionSets, Score
from topk_registry.nn.head import TopKHead

RECIPE = Preprocess((3, 8, 8), (0.5,) * 3, (0.5,) * 3)


def bare_head(metadata: Metadata, opset: int = 18) -> onnx.ModelProto:
    """A model that only has the head, behind an Identity for a backbone."""
    shape = ["batch", metadata.num_classes]
    given, logits = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("input", LOGITS))
    graph = helper.make_graph([helper.make_node("Identity", ["input"], [LOGITS])], "head", [given], [logits])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    add_head(model, metadata)
    return model


@pytest.fixture(scope="module")
def head():
    """``head(n, k)``: a function from logits (and a class list) to the outputs of an exported head."""
    made = {}

    def run(n: int, k: int, temperature: float = 1.0):
        key = n, k, temperature
        if key not in made:
            metadata = Metadata(k, temperature, n, tuple(map(str, range(n))), RECIPE)
            model = bare_head(metadata)
            onnx.checker.check_model(model, full_check=True)
            made[key] = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        session = made[key]
        names = [output.name for output in session.get_outputs()]

        def call(logits: np.ndarray, **others: np.ndarray) -> dict[str, np.ndarray]:
            return dict(zip(names, session.run(names, {"input": logits, **others}), strict=True))

        return call

    return run


def exact(row: np.ndarray, k: int, classes: list[int]) -> list[Decimal]:
    """pi_i = e_i sigma_{k-1}(e without i) / sigma_k(e) of some classes, to 50 digits: all terms are positive."""

    def sigma(values: list[Decimal]) -> list[Decimal]:
        c = [Decimal(1)] + [Decimal(0)] * k
        for value in values:
            for j in range(k, 0, -1):
                c[j] += value * c[j - 1]
        return c

    with localcontext() as context:
        context.prec, context.Emax, context.Emin = 50, 10**15, -(10**15)
        e = [Decimal(0) if np.isneginf(x) else Decimal(float(x)).exp() for x in row]
        return [e[i] * (c := sigma(e[:i] + e[i + 1 :]))[k - 1] / (c[k] + e[i] * c[k - 1]) for i in classes]


def rows_of(n: int, k: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(n)
    normal = rng.standard_normal(n).astype(np.float32)
    gap = np.where(np.arange(n) < k, 30.0, 0.0).astype(np.float32)
    free = np.where(np.arange(n) <= k, normal, np.float32(-np.inf))
    return {
        "normal": normal,
        "wide": 5 * normal,
        "shifted": normal + np.float32(1000),
        "ties": np.round(normal),
        "width of 1e4": 1e4 * normal,
        "gap after k": gap + normal,
        "one class 12 above": np.where(np.arange(n) == 0, 12.0, 0.0).astype(np.float32),
        "flat at 1.8e7": np.full(n, 1.8e7, np.float32),
        "k + 1 finite": free,
    }


SHAPES = [(12, 5)]
LARGE = [(3, 1), (3, 2), (51, 50), (1000, 5), (21_841, 1), (21_841, 50)]


@pytest.mark.parametrize(("n", "k"), [*SHAPES, *(pytest.param(*shape, marks=pytest.mark.slow) for shape in LARGE)])
def test_marginals_are_exact(head, n, k):
    run = head(n, k)
    for name, row in rows_of(n, k).items():
        if n > 1000 and name not in ("normal", "flat at 1.8e7", "k + 1 finite", "one class 12 above"):
            continue
        order = np.argsort(-row, kind="stable")
        classes = sorted({int(order[i]) for i in (0, k - 1, k, min(n, 2 * k + 1) - 1, n // 2, n - 1)})
        out = run(row[None])
        got, shares = out["marginals"][0].astype(np.float64), np.exp(row.astype(np.float64) - row.max())
        np.testing.assert_allclose(out["probabilities"][0], shares / shares.sum(), rtol=1e-5, atol=SMALLEST)
        wanted = np.array([float(value) for value in exact(row, k, classes[: 3 if n > 1000 else None])])
        classes = classes[: len(wanted)]
        assert got.sum() == pytest.approx(k, rel=1e-5), name
        seen = wanted >= SMALLEST
        np.testing.assert_allclose(got[classes][seen], wanted[seen], rtol=1e-5, err_msg=name)
        assert (np.abs(got[classes][~seen]) <= 2 * SMALLEST).all(), name


def test_the_float64_definition_of_the_verification_is_exact():
    for n, k in ((12, 5), (51, 50)):
        for name, row in rows_of(n, k).items():
            wanted = np.array([float(value) for value in exact(row, k, list(range(n)))])
            got = marginals(row[None], k)[0]
            np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=SMALLEST, err_msg=name)


@pytest.mark.parametrize("n", [pytest.param(3, marks=pytest.mark.slow), 12, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_row_does_not_depend_on_its_batch(head, n):
    run, rows = head(n, 1 if n == 3 else 5), np.random.default_rng(0).standard_normal((64, n)).astype(np.float32)
    rows[7] = np.nan
    whole = run(rows)
    assert np.isnan(whole["marginals"][7]).all()
    for size in (1, 2, 5, 64):
        parts = [run(rows[i : i + size]) for i in range(0, 64, size)]
        for name in ("marginals", "probabilities"):
            got = np.concatenate([part[name] for part in parts])
            np.testing.assert_allclose(got, whole[name], rtol=1e-6, atol=1e-30, err_msg=name)
            assert not np.isnan(np.delete(got, 7, 0)).any()


@pytest.mark.parametrize(("n", "k"), [(12, 5), pytest.param(1000, 5, marks=pytest.mark.slow)])
def test_class_lists(head, n, k):
    run, rows = head(n, k), hard_rows(n, k)
    logits = np.concatenate((rows["normal"], rows["ties"]))
    for name, mask in class_lists(n, k).items():
        out = run(logits, allowed=mask)
        masks = np.broadcast_to(mask, logits.shape)
        assert (out["marginals"][~masks] == 0).all(), name
        assert (out["probabilities"][~masks] == 0).all(), name
        np.testing.assert_allclose(out["probabilities"].sum(-1), 1, rtol=1e-5)
        inside = np.take_along_axis(masks, np.maximum(out["indices"], 0), -1)
        assert (inside | (out["indices"] == -1)).all(), name
        assert (out["logits"] == logits).all(), name
        for row in range(len(logits)):
            chosen = np.flatnonzero(masks[row])
            if len(chosen) <= k:
                assert (out["marginals"][row, chosen] == 1).all(), name
            else:  # the same as a model of these classes only
                alone = marginals(logits[row : row + 1, chosen], k)
                np.testing.assert_allclose(out["marginals"][row, chosen], alone[0], rtol=1e-5, err_msg=name)
                assert (out["indices"][row] >= 0).all(), name
    with torch.no_grad():
        eager = TopKHead(k)(torch.from_numpy(logits), allowed=torch.from_numpy(mask))  # type: ignore[call-arg]
    np.testing.assert_allclose(out["marginals"], eager.marginals, rtol=1e-5)


@pytest.mark.parametrize("n", [3, 1000, 21_841])
@pytest.mark.parametrize("opset", [13, 18, 21])
def test_for_one_class_the_head_is_a_softmax(n, opset):
    model = bare_head(Metadata(1, 1.0, n, tuple(map(str, range(n))), RECIPE), opset)
    assert len(model.graph.node) <= 22
    assert not forbidden(model.graph)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    logits = np.random.default_rng(0).standard_normal((3, n)).astype(np.float32)
    got = dict(zip([o.name for o in session.get_outputs()], session.run(None, {"input": logits}), strict=True))
    assert (got["marginals"] == got["probabilities"]).all()
    shares = np.exp(logits.astype(np.float64))
    np.testing.assert_allclose(got["marginals"], shares / shares.sum(-1, keepdims=True), rtol=1e-6)
    assert (got["indices"][:, 0] == logits.argmax(-1)).all()
    assert session.run(["marginals"], {"input": logits[:0]})[0].shape == (0, n)


@pytest.mark.parametrize("opset", [13, 18, 21])
@pytest.mark.parametrize("k", [2, 5, 7])
def test_the_head_in_other_operator_sets(k, opset):
    n = 9
    model = bare_head(Metadata(k, 0.5, n, tuple(map(str, range(n))), RECIPE), opset)
    onnx.checker.check_model(model, full_check=True)
    assert not forbidden(model.graph)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for name, logits in hard_rows(n, k).items():
        got = session.run(["marginals"], {"input": logits})[0].astype(np.float64)
        wanted = marginals(logits, k, 0.5)
        small = wanted < SMALLEST
        np.testing.assert_allclose(np.where(small, 0, got), np.where(small, 0, wanted), rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("batch", ["batch", 3])
@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.FLOAT16])
def test_half_precision_and_fixed_batches(batch, kind):
    n = 12
    given = helper.make_tensor_value_info("input", kind, [batch, n])
    logits = helper.make_tensor_value_info(LOGITS, TensorProto.FLOAT, [batch, n])
    cast = helper.make_node("Cast", ["input"], [LOGITS], to=TensorProto.FLOAT)
    graph = helper.make_graph([cast], "head", [given], [logits])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    add_head(model, Metadata(5, 1.0, n, tuple(map(str, range(n))), RECIPE))
    onnx.checker.check_model(model, full_check=True)
    x = np.random.default_rng(0).standard_normal((3, n)).astype(helper.tensor_dtype_to_np_dtype(kind))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(["marginals"], {"input": x})[0], marginals(x, 5), rtol=1e-5)


@pytest.mark.parametrize("k", [1, 5, 9])
def test_an_invalid_score_beside_excluded_classes_makes_the_row_nan(head, k):
    rows = np.full((2, 12), -np.inf, np.float32)
    rows[0, 3], rows[0, 4], rows[1, 5] = np.nan, 1.0, np.inf
    out = head(12, k)(rows)
    assert np.isnan(out["marginals"]).all()
    assert np.isnan(out["probabilities"]).all()


@pytest.mark.parametrize("n", [12, 1000, 21_841])
def test_sets_of_one_class_need_at_most_56_nodes(n):
    model = bare_head(Metadata(1, 1.0, n, tuple(map(str, range(n))), RECIPE))
    sets = PredictionSets(Score("raps"), (0.1, 0.2), np.asarray([[0.9], [0.8]]), 0.1)
    assert len(add_sets(model, sets).graph.node) <= 56


def test_marginals_can_be_omitted(head):
    outputs = {name: text for name, text in OUTPUTS.items() if name != "marginals"}
    model = bare_head(Metadata(5, 1.0, 12, tuple(map(str, range(12))), RECIPE, outputs=outputs))
    assert [output.name for output in model.graph.output] == [LOGITS, "probabilities", "indices"]
    logits = np.random.default_rng(0).standard_normal((3, 12)).astype(np.float32)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    probabilities, indices = session.run(["probabilities", "indices"], {"input": logits})
    whole = head(12, 5)(logits)
    np.testing.assert_allclose(probabilities, whole["probabilities"], rtol=1e-6)
    np.testing.assert_array_equal(indices, whole["indices"])
