"""Spoiled files: one row per promise of ``verify``. Each file must fail the check of its promise, and no other check
than those in the row."""

import re
import shutil

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.export.test_verify import calibrated, changed, edit_props
from topk_export import ModelFileError, graph, verify_file
from topk_export.runtime.metadata import ALLOWED, ALPHA, ALPHAS, THRESHOLDS
from topk_export.verify import SAMPLE, beside, report_lines

N, K = 12, 3
NAMES = tuple("abcdefghijkl")
LAST = 2**-14  # a relative error that is 6 times the tolerance


@pytest.fixture
def whole(export, tmp_path):
    """``whole(kind)``: a copy of a file that passes, with its sample beside it."""

    def copy(kind):
        options = {"task": "multilabel"} if kind == "multilabel" else {}
        source = export(N, k=K, temperature=0.5, class_names=NAMES, **options)
        path = shutil.copy(source, tmp_path / "model.onnx")
        shutil.copy(beside(source, SAMPLE), beside(path, SAMPLE))
        return calibrated(path) if kind == "sets" else path

    return copy


def failures(path) -> set[str]:
    """Return the names of the checks that fail, without what they were tried on."""
    report = verify_file(path)
    failed = {promise(check["name"]) for check in report["checks"] if not check["passed"]}
    assert report["passed"] == (not failed)
    return failed


def promise(name: str) -> str:
    return re.sub(r" \(.*\)|,? (at )?batch \d$", "", name)


def after(output: str, *steps: tuple[str, object], **attributes: object):
    """Return a change that lets the head compute ``output`` by more steps: an operator and its second input each."""

    def change(model):
        for node in model.graph.node:
            node.output[:] = [f"{name}_before" if name == output else name for name in node.output]
            node.input[:] = [f"{name}_before" if name == output else name for name in node.input]
        previous = f"{output}_before"
        for i, (op, value) in enumerate(steps):
            following = output if i == len(steps) - 1 else f"{output}_step{i}"
            name = f"topk/spoiled_{output}_{i}"
            inputs = [previous]
            if value is not None:
                model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
                inputs.append(name)
            model.graph.node.append(helper.make_node(op, inputs, [following], name, **attributes))
            previous = following

    return change


def float32(value):
    return np.asarray(value, np.float32)


def of_one_class(size):
    return float32([size] + [0] * (N - 1))


def hidden_nan(model):
    """Let marginals be 0 in place of NaN."""
    after("marginals", ("IsNaN", None), ("Where", None))(model)
    model.graph.node[-1].input[:] = ["marginals_step0", "topk/zero", "marginals_before"]
    model.graph.initializer.append(numpy_helper.from_array(float32(0), "topk/zero"))


def edit_constant(name, edit):
    """Return a change of a constant of the graph; ``edit`` returns the new value."""

    def change(model):
        (tensor,) = (tensor for tensor in model.graph.initializer if tensor.name == name)
        old = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(np.asarray(edit(old), old.dtype), name))

    return change


def edit_threshold(value):
    return edit_constant(THRESHOLDS, lambda table: np.where(np.arange(len(table))[:, None] == 1, value, table))


def edit_sets(**changes):
    return lambda model: edit_props(model, sets=lambda sets: sets | changes)


def edit_weights(model):
    for tensor in model.graph.initializer:
        if list(tensor.dims) == [N] and tensor.data_type == TensorProto.FLOAT:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) + np.float32(0.01), tensor.name))


def wrong_shape(model):
    node = model.graph.node[0]
    model.graph.value_info.append(helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, ["batch", 8, 7, 7]))


def foreign_domain(model):
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))


def forbidden(model):
    model.graph.node.append(helper.make_node("Sigmoid", ["logits"], ["unused"], "topk/unused"))


def trace(model):
    model.graph.node[0].doc_string = "File /home/me/train.py, line 3"


def trace_in_metadata(model):
    model.graph.node[-1].metadata_props.add(key="pkg.torch.onnx.stack_trace", value="/home/me/train.py")


def fixed_batch(model):
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 5


def without(field, name):
    """Return a change that removes a declared "input" or "output"."""

    def change(model):
        declared = getattr(model.graph, field)
        kept = [value for value in declared if value.name != name]
        del declared[:]
        declared.extend(kept)

    return change


def another_size(model):
    """Declare and compute one class too few in an output."""
    after("probabilities", ("Gather", np.arange(N - 1)), axis=1)(model)
    (output,) = (output for output in model.graph.output if output.name == "probabilities")
    output.type.tensor_type.shape.dim[1].dim_value = N - 1


def renamed_constants(model):
    for tensor in model.graph.initializer:
        tensor.name = {THRESHOLDS: "limits"}.get(tensor.name, tensor.name)
    for node in model.graph.node:
        node.input[:] = ["limits" if name == THRESHOLDS else name for name in node.input]


CHECKER = "onnx.checker, full"
DOMAIN = "default operator domain only"
HEAD = "no Loop, Scan, If, Sigmoid, Einsum or MatMul in the head"
TRACES = "no stack traces or local paths in the graph"
BATCH = "the batch axis is symbolic"
OPTIONAL = "optional inputs"
RUNS = "runs"
LOGITS = "logits against torch in float64"
EXCLUDED = "excluded classes are exactly 0"
MARGINALS, PROBABILITIES, SUM, TOP = "marginals", "probabilities", "sum of marginals", "top-k classes"
DIGEST, ALL_ALPHAS = "thresholds are those of the calibration", "alphas are those of the calibration"
SETS, SIZE, DEFAULT = "prediction sets", "set_size counts the set", "the default alpha is that of the calibration"
NO_TABLE, EXTERNAL = "thresholds of the prediction sets", "external weights belong to this model"

# kind of the file, change, the promise that is broken, and further checks that fail of necessity
TABLE = {
    "declared shape": ("plain", wrong_shape, CHECKER, ()),
    "foreign domain": ("plain", foreign_domain, DOMAIN, ()),
    "forbidden operator": ("plain", forbidden, HEAD, ()),
    "documentation of a node": ("plain", trace, TRACES, ()),
    "metadata of a node": ("plain", trace_in_metadata, TRACES, ()),
    "fixed batch": ("plain", fixed_batch, BATCH, (RUNS,)),
    "no input allowed": (
        "plain", without("input", ALLOWED), OPTIONAL, (EXCLUDED, MARGINALS, PROBABILITIES, SUM, TOP),
    ),
    "no input alpha": ("sets", without("input", ALPHA), OPTIONAL, (SETS,)),
    "shape of an output": ("plain", another_size, RUNS, ()),
    "missing probabilities": ("plain", without("output", "probabilities"), RUNS, ()),
    "missing logits": ("plain", without("output", "logits"), RUNS, ()),
    "missing set": ("sets", without("output", "set"), RUNS, ()),
    "weights": ("plain", edit_weights, LOGITS, ()),
    "excluded marginal above 0": ("plain", after("marginals", ("Max", float32(1e-36))), EXCLUDED, ()),
    "excluded probability above 0": ("plain", after("probabilities", ("Max", float32(1e-36))), EXCLUDED, ()),
    "excluded sigmoid above 0": ("multilabel", after("probabilities", ("Max", float32(1e-36))), EXCLUDED, ()),
    "a marginal": ("plain", after("marginals", ("Mul", 1 + of_one_class(LAST))), MARGINALS, (SUM,)),
    "all marginals": ("plain", after("marginals", ("Mul", float32(1 + LAST))), SUM, (MARGINALS,)),
    "NaN hidden": ("plain", hidden_nan, MARGINALS, ()),
    "a probability": ("plain", after("probabilities", ("Mul", 1 + of_one_class(LAST))), PROBABILITIES, ()),
    "a sigmoid": ("multilabel", after("probabilities", ("Mul", 1 - of_one_class(LAST))), PROBABILITIES, ()),
    "temperature": ("plain", lambda model: edit_props(model, temperature=0.5001), MARGINALS, ()),
    "temperature of a sigmoid": ("multilabel", lambda m: edit_props(m, temperature=0.5001), PROBABILITIES, ()),
    "last class": ("plain", after("indices", ("Min", np.int64(N - 2))), TOP, ()),
    "order of classes": ("plain", after("indices", ("Gather", np.arange(K)[::-1].copy()), axis=1), TOP, ()),
    "a class in place of none": ("plain", after("indices", ("Max", np.int64(0))), TOP, ()),
    "threshold": ("sets", edit_threshold(0.01), DIGEST, ()),
    "threshold by a bit": ("sets", edit_threshold(0.9000001), DIGEST, ()),
    "renamed thresholds": ("sets", renamed_constants, NO_TABLE, (DIGEST,)),
    "alphas of the graph": ("sets", edit_constant(ALPHAS, lambda _: [0.01, 0.100001, 0.3]), ALL_ALPHAS, ()),
    "alphas of the metadata": ("sets", edit_sets(alphas=[0.01, 0.1000001, 0.3]), ALL_ALPHAS, ()),
    "score": ("sets", edit_sets(score="aps"), SETS, ()),
    "temperature of the sets": ("sets", edit_sets(temperature=3.0), SETS, ()),
    "a class in every set": ("sets", after("set", ("Or", np.arange(N) == 0)), SETS, (SIZE,)),
    "size": ("sets", after("set_size", ("Add", np.int64(1))), SIZE, ()),
    "default alpha": ("sets", edit_constant("alpha", lambda alpha: alpha * 1.0001), DEFAULT, ()),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "change", "broken", "others"), TABLE.values(), ids=TABLE)
def test_a_spoiled_file_fails_the_check_of_its_promise(whole, kind, change, broken, others):
    path = changed(whole(kind), change)
    assert failures(path) == {broken, *others}


def spoil_weights(path, monkeypatch):
    """Let a file keep its weights beside it, and exchange them for weights of the same size."""
    model = onnx.load(str(path))
    path.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(graph, "LIMIT", 0)
        patch.setattr(graph, "SMALL", 64)
        graph.save(model, path)
    assert failures(path) == set()
    weights = path.with_name("model.onnx.data")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 64
    weights.write_bytes(content)


def test_weights_of_another_file(whole, monkeypatch):
    path = whole("plain")
    spoil_weights(path, monkeypatch)
    assert EXTERNAL in failures(path)


def test_every_promise_has_a_row(whole, monkeypatch):
    promises = {EXTERNAL, NO_TABLE}  # these two are no line of a file without external weights or of a whole file
    for kind in ("plain", "multilabel", "sets"):
        report = verify_file(whole(kind))
        assert report["passed"]
        promises |= {promise(check["name"]) for check in report["checks"]}
    assert promises == {row[2] for row in TABLE.values()} | {EXTERNAL}


@pytest.mark.parametrize("name", sorted(graph.FORBIDDEN_IN_HEAD))
def test_operators_are_forbidden_in_the_head_only(name):
    node, named = helper.make_node(name, ["x"], ["y"], "layer"), helper.make_node(name, ["x"], ["y"], "topk/layer")
    assert graph.forbidden(helper.make_graph([node], "g", [], [])) == []
    assert graph.forbidden(helper.make_graph([node, named], "g", [], [])) == [name]


def test_a_sample_without_an_entry(whole):
    path = whole("plain")
    file = beside(path, SAMPLE)
    with np.load(file) as data:
        kept = {name: data[name] for name in data if "error" not in name}
    np.savez(file, **kept)
    with pytest.raises(ModelFileError, match="is not a sample of an export"):
        verify_file(path)


def test_the_note_names_missing_outputs(whole):
    path = changed(whole("plain"), without("output", "probabilities"))
    lines = report_lines(verify_file(path))
    assert any(line.startswith("FAIL runs at batch 1") and "missing outputs: probabilities" in line for line in lines)


def test_sets_whose_metadata_have_no_digest(whole):
    path = changed(whole("sets"), edit_sets(thresholds_sha256=None))
    assert failures(path) == {DIGEST}
