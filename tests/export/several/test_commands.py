"""``predict``, ``score``, ``monitor`` and the page's folder show several labels; what takes one label says so."""

import csv
import io
import json

import numpy as np
import pytest
from PIL import Image

from tests.export.several.channels import NAMES
from topk_export import LabelPrediction, ModelFileError, Predictor
from topk_export.commands import score
from topk_export.evaluation import ExportedFile
from topk_export.scoring.rows import Rows, schema
from topk_export.serve.log import answer_entry
from topk_export.serve.triton import write_repository
from topk_registry.cli.main import main


@pytest.fixture(scope="module")
def folder(held_out, tmp_path_factory):
    root = tmp_path_factory.mktemp("colours")
    for i in range(6):
        Image.fromarray(held_out.images[i]).save(root / f"{i}.png")
    (root / "bad.png").write_bytes(b"no image")
    return root


@pytest.fixture(scope="module")
def expected(calibrated_labels, folder):
    predictor = Predictor(calibrated_labels[0], device="cpu")
    paths = sorted(folder.glob("[0-9].png"))
    return paths, predictor(paths), predictor.run(predictor.preprocess(paths))


def test_predictions(expected):
    _, predictions, out = expected
    for row, prediction in enumerate(predictions):
        assert isinstance(prediction, LabelPrediction)
        order = np.argsort(-out["probabilities"][row], kind="stable")
        assert [ranked.index for ranked in prediction.top] == order[:3].tolist()
        for name in ("labels", "set"):
            inside = getattr(prediction, name)
            assert [ranked.index for ranked in inside] == [c for c in order if out[name][row, c]]
            assert [ranked.probability for ranked in inside] == [out["probabilities"][row, r.index] for r in inside]
            assert [ranked.name for ranked in inside] == [NAMES[r.index] for r in inside]
        assert prediction.set_size == out["set_size"][row]


def test_a_file_that_is_not_calibrated_chooses_nothing(several_file, folder):
    (prediction,) = Predictor(several_file, device="cpu")([folder / "0.png"])
    assert (prediction.labels, prediction.set, prediction.set_size) == (None, None, None)
    assert len(prediction.top) == 3


@pytest.mark.parametrize("form", ["table", "json", "csv"])
def test_predict(calibrated_labels, expected, folder, capsys, form):
    paths, predictions, _ = expected
    flags = [] if form == "table" else [f"--{form}"]
    assert main(["predict", str(calibrated_labels[0]), str(folder), "--max-set", "2", "--device", "cpu", *flags]) == 1
    out, err = capsys.readouterr()
    assert "bad.png" in err
    if form == "table":
        lines = out.splitlines()
        for path, prediction in zip(paths, predictions, strict=True):
            at = lines.index(str(path))
            names = [ranked.name for ranked in prediction.labels]
            assert lines[at + 2].split() == [f"{prediction.top[0].probability:.4f}", prediction.top[0].name]
            assert f"  labels: {', '.join(names) or 'none'}" in lines[at : at + 7]
            cut = [ranked.name for ranked in prediction.set[:2]] + (["..."] if prediction.set_size > 2 else [])
            assert f"  set of {prediction.set_size}: {', '.join(cut) or 'none'}" in lines[at : at + 7]
    elif form == "json":
        answers = {answer["file"]: answer for answer in map(json.loads, out.splitlines())}
        for path, prediction in zip(paths, predictions, strict=True):
            answer = answers[str(path)]
            assert set(answer) == {"file", "top", "labels", "set", "set_size"}
            assert [ranked["name"] for ranked in answer["labels"]] == [ranked.name for ranked in prediction.labels]
            assert len(answer["set"]) == min(2, prediction.set_size)
            assert answer["set_size"] == prediction.set_size
        assert "error" in answers[str(folder / "bad.png")]
    else:
        rows = list(csv.DictReader(io.StringIO(out)))
        assert list(rows[0]) == ["file", "rank", "index", "class", "probability", "in_top_k", "chosen", "in_set"]
        for path, prediction in zip(paths, predictions, strict=True):
            mine = [row for row in rows if row["file"] == str(path)]
            assert [row["class"] for row in mine if row["chosen"] == "1"] == [r.name for r in prediction.labels]
            assert [row["class"] for row in mine if row["in_top_k"] == "1"] == [r.name for r in prediction.top]
            assert [int(row["rank"]) for row in mine] == list(range(1, len(mine) + 1))


def test_what_is_of_one_label_is_refused(several_file, folder, capsys, tmp_path):
    with pytest.raises(ValueError, match=r"a softmax mass is of files with one label an image, got 0\.9 for a file of"):
        Predictor(several_file, device="cpu")([folder / "0.png"], softmax_mass=0.9)
    for name, *flags in (["predict"], ["score", "--output", str(tmp_path / "out")]):
        assert main([name, str(several_file), str(folder), "--labels", *flags]) == 1
        assert "--labels expects a file with one label an image, as folders tell one, and" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    running = type("Running", (), {"device": "cpu", "batch_size": 2, "workers": 1})
    with pytest.raises(ModelFileError, match=r"expected a file with one label an image, .* gives several"):
        ExportedFile(several_file, running).open(None)


def test_rows_of_scores(calibrated_labels, several_file, expected, folder):
    _, predictions, out = expected
    predictor = Predictor(calibrated_labels[0], device="cpu")
    inputs = list(predictor.preprocess([folder / f"{i}.png" for i in range(6)]))
    rows = Rows(predictor, schema(full=True, about={}, several=True), top=None, max_set=1)
    found = rows.of([f"{i}" for i in range(6)], inputs).to_pylist()
    for i, (row, prediction) in enumerate(zip(found, predictions, strict=True)):
        assert list(row) == ["path", "index", "class", "logit", "probability", "labels", "set", "set_size", "error",
                             "logits", "probabilities"]  # fmt: skip
        assert row["class"] == [ranked.name for ranked in prediction.top]
        assert row["probability"] == pytest.approx([ranked.probability for ranked in prediction.top])
        assert row["labels"] == [ranked.index for ranked in prediction.labels]
        assert row["set"] == [ranked.index for ranked in prediction.set[:1]]
        assert row["set_size"] == prediction.set_size
        assert row["probabilities"] == pytest.approx(out["probabilities"][i])
    plain = Predictor(several_file, device="cpu")
    rows = Rows(plain, schema(full=False, about={}, several=True), top=1, max_set=None)
    (row,) = rows.of(["a"], inputs[:1]).to_pylist()
    assert row["labels"] is row["set"] is row["set_size"] is row["error"] is None
    assert len(row["index"]) == 1


@pytest.mark.slow
def test_score(calibrated_labels, folder, tmp_path, expected):
    import pyarrow.parquet as pq

    argv = [str(calibrated_labels[0]), str(folder), "--output", str(tmp_path / "out"), "--workers", "1"]
    argv += ["--device", "cpu"]
    assert score.main(argv) == score.HAS_ERRORS
    assert score.main(argv) == score.HAS_ERRORS  # nothing is done twice
    rows = {row["path"]: row for row in pq.read_table(tmp_path / "out" / "part-000000.parquet").to_pylist()}
    for path, prediction in zip(*expected[:2], strict=True):
        assert rows[str(path)]["labels"] == [ranked.index for ranked in prediction.labels]
    assert rows[str(folder / "bad.png")]["labels"] is None


def test_a_line_of_the_log(expected):
    from dataclasses import asdict

    prediction = expected[1][0]
    entry = answer_entry(asdict(prediction), {})
    assert entry["probability"] == pytest.approx(prediction.top[0].probability, rel=1e-5)
    assert (entry["size"], entry["class"]) == (prediction.set_size, prediction.top[0].index)


def test_triton_labels_the_outputs_of_one_value_a_class(calibrated_labels, tmp_path):
    config = (write_repository(calibrated_labels[0], tmp_path) / "config.pbtxt").read_text()
    for name in ("logits", "probabilities", "labels", "set"):
        (line,) = (line for line in config.splitlines() if f'name: "{name}"' in line)
        assert 'label_filename: "labels.txt"' in line
