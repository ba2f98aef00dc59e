"""The exported graph: its rules, its size, and its marginals against exact sums."""

import numpy as np
import onnx
import pytest
import torch

from tests.export.conftest import tiny
from tests.ops.ksubset.scores import KINDS, scores
from tests.ops.ksubset.static_rows import assert_near, rows
from tests.oracles import mp_marginals
from topk_export import ExportError
from topk_export.verification import graph

FORBIDDEN = {"Loop", "Scan", "If", "Sigmoid", "Einsum", "MatMul", "Gemm", "Atan", "CumProd"}


@pytest.mark.slow
@pytest.mark.parametrize(("n", "k", "temperature"), [(2, 1, 1.0), (12, 11, 0.25), (60, 40, 1.0), (300, 5, 1.0)])
def test_marginals_in_onnxruntime_are_those_of_the_definition(export, head_session, n, k, temperature):
    session = head_session(export(n, k=k, temperature=temperature, verify=False))
    named = rows(n, k)
    s = torch.stack(list(named.values())).numpy()
    for name, row, got in zip(named, s, session.run(["marginals"], {"logits": s})[0], strict=True):
        wanted = np.array(mp_marginals((row.astype(float) / temperature).tolist(), k))
        assert_near(got, wanted, name)


@pytest.mark.slow
def test_marginals_of_impossible_classes(export, head_session):
    session = head_session(export(300, k=5, temperature=1.0, verify=False))
    s = np.random.default_rng(0).standard_normal((2, 300)).astype(np.float32)
    s[:, ::3] = -np.inf
    got = session.run(["marginals"], {"logits": s})[0]
    assert (got[:, ::3] == 0).all()
    keep = np.arange(300) % 3 != 0
    assert_near(got[:, keep], np.array([mp_marginals(row.tolist(), 5) for row in s[:, keep].astype(float)]))


@pytest.mark.slow
@pytest.mark.parametrize(("n", "k"), [(1000, 50), (21841, 5)])
def test_large_heads_pass_their_own_verification(export, n, k):
    assert export(n, k=k).is_file()  # against the float64 definition, on every kind of hard row


@pytest.mark.slow
def test_the_head_is_small_and_of_plain_operators(export):
    model = onnx.load(str(export(1000, k=5)))
    head = graph.head_nodes(model.graph)
    assert len(head) <= 250
    assert not {node.op_type for node in head} & FORBIDDEN
    assert {node.domain for node in model.graph.node} | {entry.domain for entry in model.opset_import} == {""}
    assert not model.functions
    assert [entry.version for entry in model.opset_import] == [18]
    assert not [node for node in model.graph.node if node.op_type == "Einsum"]


@pytest.mark.slow
def test_the_batch_axis_has_a_name(export):
    model = onnx.load(str(export(1000, k=5)))
    shapes = {value.name: graph.value_shape(model.graph, value.name) for value in model.graph.output}
    assert shapes == {"logits": ["batch", 1000], "marginals": ["batch", 1000], "indices": ["batch", 5]}
    assert graph.value_shape(model.graph, "input") == ["batch", 3, 8, 8]


@pytest.mark.slow
def test_one_file_and_no_trace_of_the_machine(export, tmp_path_factory):
    path = export(1000, k=5)
    assert sorted(p.name for p in path.parent.iterdir()) == [
        "model.labels.txt",
        "model.onnx",
        "model.preprocess.json",
        "model.report.json",
        "model.sample.npz",
    ]
    model = onnx.load(str(path), load_external_data=False)
    assert not any(tensor.external_data for tensor in model.graph.initializer)
    content = path.read_bytes()
    for trace in (b"site-packages", b".py", b"/home", b"/root", b"/tmp", b"stack_trace", b"File ", str(tiny).encode()):
        assert trace not in content


@pytest.mark.slow
def test_dead_branches_go_with_the_outputs_that_needed_them(export):
    whole, lean = (onnx.load(str(export(300, k=5, temperature=1.0, verify=False))) for _ in range(2))
    graph.keep_outputs(lean, ("indices",))
    assert [output.name for output in lean.graph.output] == ["indices"]
    assert len(graph.head_nodes(lean.graph)) == 1
    assert len(lean.graph.initializer) < len(whole.graph.initializer)
    with pytest.raises(ExportError, match="no tensor named 'other'"):
        graph.value_shape(lean.graph, "other")


def test_the_rules_see_what_they_forbid(export):
    model = onnx.load(str(export(300, k=5, temperature=1.0, verify=False)))
    model.graph.node.append(onnx.helper.make_node("Sigmoid", ["marginals"], ["x"], domain="other", doc_string="a.py"))
    assert graph.forbidden(model.graph) == ["Sigmoid"]
    assert graph.domains(model) == ["other"]
    assert graph.traces(model) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_all_outputs_of_the_head_agree_with_torch(export, head_session, kind):
    session = head_session(export(300, k=5, temperature=1.0, verify=False))
    s = scores(kind, 300)
    indices = session.run(["indices"], {"logits": s.numpy()})[0]
    assert indices.dtype == np.int64
    wanted = s.topk(5).values
    torch.testing.assert_close(s.gather(1, torch.from_numpy(indices)), wanted, rtol=0, atol=0)


def test_attributes_that_say_nothing_are_dropped():
    from onnx import helper, numpy_helper

    shapes = [numpy_helper.from_array(np.array(shape), name) for name, shape in (("a", [2, -1]), ("b", [0, 4]))]
    nodes = [
        helper.make_node("ScatterElements", ["x", "i", "u"], ["y"], axis=1, reduction="none"),
        helper.make_node("ScatterElements", ["x", "i", "u"], ["z"], axis=1, reduction="add"),
        helper.make_node("Reshape", ["y", "a"], ["p"], allowzero=1),
        helper.make_node("Reshape", ["y", "b"], ["q"], allowzero=1),
        helper.make_node("Reshape", ["y", "computed"], ["r"], allowzero=1),
    ]
    model = helper.make_model(helper.make_graph(nodes, "g", [], [], shapes))
    graph.plain_attributes(model)
    found = [{attribute.name for attribute in node.attribute} for node in model.graph.node]
    assert found == [{"axis"}, {"axis", "reduction"}, set(), {"allowzero"}, {"allowzero"}]
