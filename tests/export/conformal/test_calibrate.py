"""``topk-registry calibrate``: an exported file and a folder in, a file with sets and a report out."""

import json
import shutil

import numpy as np
import onnx
import pytest

from tests.export.colours import COLOURS
from topk_export import Predictor, verify
from topk_export.calibration.monitor import reference_of
from topk_export.calibration.plan import Plan, split
from topk_export.calibration.run import calibrate_file
from topk_export.samples import open_folder
from topk_registry.cli.main import main
from topk_registry.conformal import SCORES, PredictionSets, Thresholds, create_score
from topk_registry.folders.errors import WrongLabelsError
from topk_registry.folders.trees import tree_of

NAMES = tuple(COLOURS)
ROOT_ONLY = tree_of([(name, "colour") for name in NAMES], NAMES)


@pytest.fixture
def run(capsys, colours_file, held_out, tmp_path):
    def call(*flags, model=colours_file, data=held_out, output=None):
        capsys.readouterr()
        output = output or tmp_path / "out.onnx"
        status = main(["calibrate", str(model), "-o", str(output), "--data-dir", str(data), "--device", "cpu",
                       *map(str, flags)])  # fmt: skip
        printed = capsys.readouterr()
        return status, output, printed

    return call


@pytest.fixture(scope="module")
def calibrated(colours_file, held_out, tmp_path_factory):
    """A file with sets, made once, and what was found."""
    output = tmp_path_factory.mktemp("calibrated") / "model.onnx"
    found = calibrate_file(colours_file, output, open_folder(held_out, NAMES), Plan("raps", seed=3), device="cpu")
    return output, found


@pytest.mark.parametrize(("score", "largest"), [("lac", {12}), ("aps", {1, 2})])
def test_the_largest_size_is_that_of_the_score(run, score, largest):
    status, output, printed = run("--score", score, "--max-size", "2", "--alpha", "0.4")
    assert status == 0, printed.err
    sets = Predictor(output, device="cpu").metadata.sets
    assert sets is not None
    assert sets["max_size"] in largest  # only ranked scores look at the best classes alone


def test_the_command_writes_a_file_and_a_report(run, colours_file):
    before = colours_file.read_bytes()
    status, output, printed = run("--alpha", "0.2")
    assert status == 0, printed.err
    assert colours_file.read_bytes() == before
    assert "score       raps (penalty " in printed.out
    assert "promised    the label is in the set with probability at least 0.8" in printed.out
    report = output.with_suffix(".html").read_text()
    for heading in ("Coverage by size", "Coverage by class", "Coverage by frequency", "Temperature", "Facts"):
        assert f"<h2>{heading}</h2>" in report
    assert report.count("<svg") == 4
    assert "http" not in report.replace("http-equiv", "")
    assert sorted(path.name for path in output.parent.iterdir()) == ["out.html", "out.onnx"]


def test_the_file_gives_its_sets_and_says_what_they_promise(calibrated, held_out):
    output, _ = calibrated
    predictor = Predictor(output, device="cpu", threads=1)
    sets = predictor.metadata.sets
    assert sets is not None
    assert (sets["score"], sets["rule"], sets["alpha"], sets["samples"]) == ("raps", "marginal", 0.1, 144)
    assert sets["report_samples"] == 180
    assert sets["tuning_samples"] == 36
    assert sets["date"].endswith("+00:00")
    assert len(sets["fingerprint"]) == 64
    out = predictor.run(predictor.preprocess([held_out / "red" / "00.png", held_out / "grey" / "03.png"]))
    assert out["set"].dtype == np.bool_
    np.testing.assert_array_equal(out["set"].sum(-1), out["set_size"])
    score = create_score("raps", **sets["options"])
    limits = Thresholds(sets["threshold"], sets["max_size"])
    expected = PredictionSets(score, limits, sets["temperature"])(out["logits"].astype(np.float64))
    np.testing.assert_array_equal(out["set"], expected)
    (prediction, _) = predictor([held_out / "red" / "00.png", held_out / "grey" / "03.png"])
    assert prediction.set is not None
    best_first = sorted(np.flatnonzero(out["set"][0]), key=lambda y: -out["logits"][0, y])
    assert [ranked.index for ranked in prediction.set] == best_first
    assert prediction.set_size == out["set_size"][0]
    report = verify(output, device="cpu")
    assert report["passed"], [check for check in report["checks"] if check["passed"] is False]


def test_its_report_is_what_the_file_does(calibrated, held_out):
    """The report's coverage, counted again from the images, and the threshold from the calibration's own scores."""
    output, found = calibrated
    samples = open_folder(held_out, NAMES)
    predictor = Predictor(output, device="cpu")
    out = predictor.run(predictor.preprocess(samples.images))
    order = np.random.default_rng(3).permutation(360)
    report, calibration = np.sort(order[:180]), np.sort(order[216:])
    hit = out["set"][np.arange(360), samples.labels]
    assert found.counts.total == 180
    assert found.facts["report_coverage"] == pytest.approx(hit[report].mean(), abs=1e-6)
    assert found.facts["report_mean_size"] == pytest.approx(out["set_size"][report].mean(), abs=1e-6)
    # never equal scores: exactly ceil(145 * 0.9) = 131 of the calibration's labels are covered
    assert hit[calibration].sum() == 131


def test_a_best_class_that_is_enough_is_told(run, held_out):
    status, output, printed = run("--score", "aps", "--alpha", "0.7")
    assert status == 0, printed.err
    assert "note: the best class alone covers at least 0.3, so sets have no other" in printed.err
    predictor = Predictor(output, device="cpu")
    sets = predictor.metadata.sets
    assert sets["best_class_alone"] is True
    assert sets["threshold"] is None  # JSON, also in the browser, has no minus infinity
    assert sets["samples_at_threshold"] > 1
    assert sets["report_mean_size"] == 1
    assert sets["report_coverage"] > 0.3
    out = predictor.run(predictor.preprocess(sorted(held_out.rglob("*.png"))[::30]))
    np.testing.assert_array_equal(out["set"].argmax(-1), out["logits"].argmax(-1))
    assert (out["set_size"] == 1).all()
    assert "have a coverage of (Beta law)" not in output.with_suffix(".html").read_text()
    for prop in onnx.load(str(output)).metadata_props:
        json.loads(prop.value, parse_constant=pytest.fail)
    status, output, printed = run("--score", "aps", "--alpha", "0.7", "--allow-empty", "--json")
    facts = json.loads(printed.out)
    assert facts["best_class_alone"] is False
    assert facts["report_empty"] > 0
    assert "expected" in facts["coverage"]


def test_sets_without_a_coverage_have_the_size_that_was_asked_for(run):
    status, _, printed = run("--score", "aps", "--average-size", "1")
    assert status == 0, printed.err
    assert "the best class alone covers" not in printed.err
    assert "mean size   1.00 of 12 classes" in printed.out
    status, _, printed = run("--score", "aps", "--average-size", "0.5")
    assert status == 1
    assert "mean size of sets that may not be empty is at least 1, got 0.5: let them be empty" in printed.err
    assert run("--score", "aps", "--average-size", "0.5", "--allow-empty")[0] == 0


def test_a_file_of_an_earlier_version_is_read_and_calibrated_again(calibrated, held_out, tmp_path, run):
    """Its facts lack what was added since; its sets are its own."""
    output, _ = calibrated
    older = onnx.load(str(output))
    (kept,) = (prop for prop in older.metadata_props if prop.key == "sets")
    facts = json.loads(kept.value)
    for key in ("best_class_alone", "samples_at_threshold"):
        del facts[key]
    kept.value = json.dumps(facts)
    onnx.save(older, str(tmp_path / "older.onnx"))
    images = sorted(held_out.rglob("*.png"))[::60]
    (now, then) = (Predictor(path, device="cpu") for path in (output, tmp_path / "older.onnx"))
    assert [p.set for p in then(images)] == [p.set for p in now(images)]
    assert verify(tmp_path / "older.onnx", device="cpu")["passed"]
    assert len(reference_of(tmp_path / "older.onnx")["size"]) == 180
    status, again, printed = run("--seed", "3", model=tmp_path / "older.onnx")
    assert status == 0, printed.err
    assert Predictor(again, device="cpu").metadata.sets["threshold"] == now.metadata.sets["threshold"]


@pytest.mark.parametrize(
    ("score", "rule", "options"),
    [
        *((score, "marginal", {"tree": ROOT_ONLY} if score == "tree" else {}) for score in SCORES),
        ("aps", "marginal", {"temperature": None}),
        ("pas", "marginal", {"class_weights": (2.0,) * 12}),
        ("lac", "per_class", {}),
        ("log_odds", "interpolated", {"rule_options": {"share": 0.4}}),
        ("aps", "clustered", {"rule_options": {"clusters": 2}}),
        ("lac", "rc3p", {}),
        ("aps", "average_size", {"rule_options": {"size": 2.0}}),
    ],
)
@pytest.mark.slow
def test_every_score_and_rule_reaches_its_graph(colours_file, held_out, tmp_path, score, rule, options):
    plan = Plan(score, 0.2, rule, **options)
    found = calibrate_file(colours_file, tmp_path / "out.onnx", open_folder(held_out, NAMES), plan, device="cpu")
    coverage = found.counts.hits.sum() / found.counts.total
    # 180 samples, and thresholds from as few as 12 a class: the guarantee has tests of its own, this is about the path
    assert 0.6 < coverage <= 1
    assert onnx.load(str(tmp_path / "out.onnx")).graph.output[-1].name == (
        "set_nodes" if score == "tree" else "set_size"
    )
    if rule == "average_size":
        assert found.facts["report_mean_size"] == pytest.approx(2.0, abs=0.3)
    if score == "topk":
        assert np.count_nonzero(found.counts.size_seen) == 1


def test_a_class_without_samples_is_in_every_set(colours_file, held_out, tmp_path, run):
    few = tmp_path / "few"
    shutil.copytree(held_out, few)
    shutil.rmtree(few / "pink")
    status, output, printed = run("--score", "lac", "--rule", "per-class", "--alpha", "0.2", data=few)
    assert status == 0, printed.err
    assert "1 classes have too few samples for a threshold of their own, so they are in every set" in printed.err
    predictor = Predictor(output, device="cpu")
    out = predictor.run(predictor.preprocess(sorted(held_out.rglob("*.png"))))
    assert out["set"][:, NAMES.index("pink")].all()
    assert predictor.metadata.sets["classes_without_samples"] == 1


@pytest.mark.slow
def test_a_registered_data_set_can_be_held_out(tmp_path, capsys):
    from tests.export.conftest import NORMAL, tiny
    from topk_export import export_onnx

    config = {"input_size": (3, 32, 32), "crop_pct": 1.0, "interpolation": "bilinear", **NORMAL}
    model = export_onnx(tiny(6), tmp_path / "model.onnx", k=2, data_config=config)
    options = ["--dataset", "topk/hierarchy", "--dataset-opt", "superclasses=2", "fine=3", "eval_size=120"]
    output = tmp_path / "out.onnx"
    flags = ["-o", str(output), "--score", "lac", "--json", "--device", "cpu", *options]
    assert main(["calibrate", str(model), *flags]) == 1
    assert "error: top-1 accuracy is 16.7% on 120 images, where chance has 16.7%" in capsys.readouterr().err
    assert not output.exists()
    status = main(["calibrate", str(model), *flags, "--force"])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    assert "6 classes in order, as the model names none: field 00-0 = 0, field 00-1 = 1" in printed.err
    facts = json.loads(printed.out)
    assert facts["data"] == "topk/hierarchy validation"
    assert facts["samples"] == facts["report_samples"] == 60
    # another number of classes does not fit the file
    more = [*options[:2], "--dataset-opt", "eval_size=120"]
    status = main(["calibrate", str(model), "-o", str(output), "--device", "cpu", *more])
    assert status == 1
    assert "validation has 100 classes, 'field 00-0'" in (err := capsys.readouterr().err)
    assert "and the file has 6 classes: 0, 1, 2, 3, 4, 5; expected these names" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--alpha", "0.001"],
            "144 calibration samples are too few for alpha = 0.001: it takes 999, or alpha of",
        ),
        (["--tune-share", "0"], "raps is tuned on samples of its own, and tune = 0 leaves none"),
        (["--score", "aps", "--max-size", "1", "--alpha", "0.02"], "beyond the 1 best classes"),
        (
            ["--score", "aps", "--max-size", "1", "--alpha", "0.02", "--rule", "interpolated"],
            "beyond the 1 best classes",
        ),
        (["--score", "lac", "--share", "0.5"], "rule marginal takes no options, got share"),
        (["--score", "pas", "--weight", "0.5"], "score pas takes prior, weights, got weight"),
        (
            ["--score", "log-odds", "--temperature", "fit"],
            "takes the marginals of the file, at its own temperature, got 'fit'",
        ),
        (["--score", "lac", "--temperature", "-1"], "the temperature must be above 0 and finite, got -1.0"),
    ],
)
def test_what_cannot_be_calibrated_says_what_would_do(run, flags, message):
    status, output, printed = run(*flags)
    assert status == 1
    assert message in printed.err
    assert list(output.parent.iterdir()) == []


@pytest.mark.parametrize("shares", [{"report": 1.0}, {"report": 0.0}, {"tune": 1.0}])
def test_shares_of_samples_leave_some_to_calibrate(shares):
    with pytest.raises(ValueError, match=r"shares of samples must be between 0 and 1, got report"):
        split(100, Plan("lac", 0.1, **shares))


def test_nothing_is_written_over_the_model_or_half(run, colours_file, held_out, tmp_path, monkeypatch):
    status, _, printed = run(output=colours_file)
    assert status == 1
    assert "calibration writes a new file" in printed.err
    (tmp_path / "out.onnx").write_text("earlier")
    broken = tmp_path / "broken"
    shutil.copytree(held_out, broken)
    (broken / "red" / "00.png").write_text("no image")
    status, output, printed = run(data=broken)
    assert status == 1
    assert "is not an image of a known format" in printed.err
    assert output.read_text() == "earlier"
    assert not output.with_suffix(".html").exists()


def test_folders_that_do_not_fit_are_told(run, held_out, tmp_path):
    few = tmp_path / "few"
    shutil.copytree(held_out / "red", few / "red")
    shutil.copytree(held_out / "grey", few / "cat")
    status, _, printed = run(data=few)
    assert status == 1
    assert f"{few} has the classes 'cat', and the file has 12 classes: {NAMES[0]}, " in printed.err
    assert run(data=tmp_path / "none")[0] == 1


def test_a_file_without_logits_says_how_to_export_it(run, colours_file, tmp_path):
    model = onnx.load(str(colours_file))
    kept = [output for output in model.graph.output if output.name != "logits"]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    onnx.save(model, str(tmp_path / "less.onnx"))
    status, _, printed = run(model=tmp_path / "less.onnx")
    assert status == 1
    assert "export it with --outputs indices logits marginals" in printed.err


def test_the_same_data_have_the_same_fingerprint(colours_file, held_out, tmp_path, calibrated):
    samples = open_folder(held_out, NAMES)
    again = calibrate_file(colours_file, tmp_path / "a.onnx", samples, Plan("raps", seed=3), device="cpu", batch_size=7)
    assert again.facts["fingerprint"] == calibrated[1].facts["fingerprint"]
    other = samples._replace(labels=(samples.labels + 1) % 12)
    with pytest.raises(WrongLabelsError, match=r"images with the label '.*' are mostly taken for"):
        calibrate_file(colours_file, tmp_path / "b.onnx", other, Plan("raps", seed=3), device="cpu")
    changed = calibrate_file(colours_file, tmp_path / "b.onnx", other, Plan("raps", seed=3), device="cpu", force=True)
    assert changed.facts["fingerprint"] != calibrated[1].facts["fingerprint"]


def renamed(held_out, folder, names):
    """A copy of the images whose folders have other names, in the order of the classes."""
    for old, new in zip(NAMES, names, strict=True):
        shutil.copytree(held_out / old, folder / new)
    return folder


def test_folders_without_names_of_classes_come_in_natural_order(run, held_out, tmp_path, calibrated):
    """In plain order c10 comes before c2, and ten of twelve classes would change places."""
    status, output, printed = run(data=renamed(held_out, tmp_path / "numbered", [f"c{i}" for i in range(12)]))
    assert status == 0, printed.err
    pairs = ", ".join(f"c{i} = {name}" for i, name in enumerate(NAMES))
    assert f"360 images of {tmp_path / 'numbered'}: 12 classes in order, as no name is the same: {pairs}" in printed.err
    top1 = Predictor(output, device="cpu").metadata.sets["top1"]
    assert top1 == calibrated[1].facts["top1"] > 0.6
    assert f"top-1       {top1:.1%} of 360 images" in printed.out


def test_a_part_by_name_is_refused(run, held_out, tmp_path):
    data = renamed(held_out, tmp_path / "one", [*NAMES[:-1], "new"])
    status, output, printed = run(data=data)
    assert (status, output.exists()) == (1, False)
    assert f"has the classes 'new', and the file has 12 classes: {', '.join(NAMES[:10])}" in printed.err
    status, output, printed = run("--ignore-unknown-classes", data=data)
    assert status == 0, printed.err
    assert "11 classes by name; left out, as the file has none of this name: new" in printed.err
    assert f"without images: {NAMES[-1]}" in printed.err


def test_classes_in_other_places_are_noticed_and_may_be_forced(run, held_out, tmp_path):
    plain = sorted(f"c{i}" for i in range(12))
    data = renamed(held_out, tmp_path / "plain", [f"d{plain.index(f'c{i}')}" for i in range(12)])
    status, output, printed = run(data=data)
    assert (status, output.exists()) == (1, False)
    assert "are mostly taken for" in printed.err
    assert run("--force", data=data)[0] == 0


def test_a_class_folder_without_images_is_named(run, held_out, tmp_path):
    data = renamed(held_out, tmp_path / "empty", NAMES)
    shutil.rmtree(data / "pink")
    (data / "pink").mkdir()
    status, _, printed = run(data=data)
    assert status == 0, printed.err
    assert "without images: pink" in printed.err


def test_files_of_archives_are_no_images(run, held_out, tmp_path):
    data = renamed(held_out, tmp_path / "mac", NAMES)
    (data / "red" / "._00.png").write_bytes(b"no image")
    (data / ".Trash").mkdir()
    status, _, printed = run(data=data)
    assert status == 0, printed.err
    assert "360 images" in printed.err
