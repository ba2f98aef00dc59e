"""Sets along a tree and thresholds by group in files: numpy and the graph agree, commands show nodes and groups."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from tests.conformal.rows import families, model_rows
from tests.export.colours import COLOURS, TREE
from topk_export import Predictor, verify
from topk_export.calibration.data import with_groups
from topk_export.calibration.graph import add_sets, set_model, without_sets
from topk_export.calibration.plan import Plan
from topk_export.calibration.run import calibrate_file
from topk_export.errors import ModelFileError
from topk_export.samples import Samples, open_folder
from topk_export.serve.answers import Ranking
from topk_export.verification.checks import hard_rows
from topk_registry.cli.main import main
from topk_registry.conformal import PredictionSets, Thresholds, create_score, probabilities
from topk_registry.folders.trees import read_tree

NAMES, N = tuple(COLOURS), 24


@pytest.fixture(scope="module")
def model(export):
    return onnx.load(str(export(N, k=5)))


@pytest.fixture
def tree_file(tmp_path):
    (tmp_path / "tree.csv").write_text(TREE)
    return tmp_path / "tree.csv"


@pytest.fixture
def groups_file(tmp_path, held_out):
    """Odd numbers were taken by night; two images are of a camera that calibration will see too rarely."""
    images = sorted(held_out.rglob("*.png"))
    with (tmp_path / "groups.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(("image", "camera", "group"))
        for i, path in enumerate(images):
            group = "rare" if i in (5, 100) else ("day", "night")[int(path.stem) % 2]
            writer.writerow((path.relative_to(held_out).as_posix(), f"c{i % 3}", group))
    return tmp_path / "groups.csv"


def run(built, logits, **groups):
    session = onnxruntime.InferenceSession(built.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {"logits": logits.astype(np.float32), **groups}), strict=True))


@pytest.mark.parametrize("m", [1, 2, 4])
def test_nodes_in_the_graph_are_those_of_numpy(model, m):
    score = create_score("tree", parents=families(N), nodes=m)
    rows = {"model": model_rows(60, N)[0].astype(np.float32), **hard_rows(N, 5)}
    for threshold in (-math.inf, -0.11237, -1.37e-3):
        sets = PredictionSets(score, Thresholds(threshold), 1.3)
        built = set_model(add_sets(model, sets, N, max_size=N))
        for name, logits in rows.items():
            out, p = run(built, logits), probabilities(logits.astype(np.float64), 1.3)
            expected = sets(logits.astype(np.float64))
            np.testing.assert_array_equal(out["set"], expected, err_msg=name)
            np.testing.assert_array_equal(out["set_nodes"], score.nodes_of(p, expected), err_msg=name)
            assert out["set_nodes"].dtype == np.int64
            assert (out["set_nodes"] >= 0).sum(-1).min() >= 1


@pytest.mark.parametrize("name", ["lac", "aps", "saps", "tree"])
@pytest.mark.parametrize("allow_empty", [False, True])
def test_groups_in_the_graph_are_those_of_numpy(model, name, allow_empty):
    options = {"parents": families(N)} if name == "tree" else {}
    score = create_score(name, **options)
    levels = {"lac": (0.6123, 0.9437), "aps": (0.7137, 0.9137), "saps": (0.7737, 1.2411), "tree": (-0.3112, -0.0312)}
    logits, numbers = model_rows(60, N)[0].astype(np.float32), np.arange(60) % 4 - 1
    for limits in ((*levels[name], math.inf), (*levels[name], -math.inf)):
        sets = PredictionSets(score, Thresholds(np.array(limits), 20, ("a", "b", "c")), 1.0, allow_empty)
        if name in ("lac", "tree"):  # not ranked: no limit of ranks in the graph
            sets = PredictionSets(score, Thresholds(np.array(limits), None, ("a", "b", "c")), 1.0, allow_empty)
        whole = add_sets(model, sets, N, max_size=20)
        onnx.checker.check_model(whole, full_check=True)
        built = set_model(whole)
        out = run(built, logits, group=numbers)
        np.testing.assert_array_equal(out["set"], sets(logits.astype(np.float64), groups=numbers))
        np.testing.assert_array_equal(out["set_size"], out["set"].sum(-1))
        np.testing.assert_array_equal(run(built, logits)["set"], sets(logits.astype(np.float64)))  # not told
        one = run(built, logits, group=np.array([1]))  # one group for the batch
        np.testing.assert_array_equal(one["set"], sets(logits.astype(np.float64), groups=np.ones(60, int)))
        with pytest.raises(Exception, match="out of data bounds"):
            run(built, logits, group=np.full(60, 4))  # 3 is the entry of -1
        assert [value.name for value in without_sets(whole).graph.input] == [v.name for v in model.graph.input]


@pytest.fixture
def calibrate(colours_file, held_out, tmp_path, capsys):
    def call(*flags, output="out.onnx"):
        capsys.readouterr()
        status = main(["calibrate", str(colours_file), "-o", str(tmp_path / output), "--data-dir", str(held_out),
                       "--device", "cpu", *map(str, flags)])  # fmt: skip
        return status, tmp_path / output, capsys.readouterr()

    return call


def test_commands_show_nodes(calibrate, tree_file, held_out, capsys, tmp_path):
    status, output, printed = calibrate("--tree", tree_file, "--alpha", "0.2")
    assert status == 0, printed.err
    assert "score       tree (nodes 1)" in printed.out
    assert "promised    the label is in the set with probability at least 0.8" in printed.out
    tree = read_tree(tree_file, NAMES)
    images = sorted(held_out.rglob("*.png"))
    predictor = Predictor(output, device="cpu")
    found = predictor(images)
    for prediction in found:
        (node,) = prediction.set_nodes
        below = {NAMES[y] for y in np.flatnonzero(tree.members[tree.names.index(node)])}
        assert {ranked.name for ranked in prediction.set} == below
        assert prediction.top[0].name in below
    sizes = {prediction.set_size for prediction in found}
    assert 1 in sizes
    assert len(sizes) > 1
    assert verify(output, device="cpu")["passed"]
    capsys.readouterr()
    node = found[3].set_nodes[0]
    assert main(["predict", str(output), str(images[3]), "--device", "cpu"]) == 0
    assert f"  prediction set of {found[3].set_size}: {node}: " in capsys.readouterr().out
    assert main(["predict", str(output), str(images[3]), "--json", "--device", "cpu"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["set_nodes"] == [node]
    answer = {name: line[name] for name in Ranking.model_fields}
    assert Ranking(**answer).set_nodes == [node]
    pq = pytest.importorskip("pyarrow.parquet")
    assert main(["score", str(output), str(held_out), "-o", str(tmp_path / "scores"), "--device", "cpu"]) == 0
    rows = {row["path"]: row for row in pq.read_table(tmp_path / "scores").to_pylist()}
    assert [tuple(rows[str(path)]["set_nodes"]) for path in images] == [each.set_nodes for each in found]


ODD = '''level,group,colour
"a, ""b""","x, y",black
"a, ""b""","x, y",brown
"a, ""b""","x, y",grey
"a, ""b""",=1+1,purple
"a, ""b""",=1+1,pink
é <'i'>,Ä & ö/ü,red
é <'i'>,Ä & ö/ü,orange
é <'i'>,Ä & ö/ü,yellow
é <'i'>,cool,blue
é <'i'>,cool,green
é <'i'>,cool,turquoise
,white lone,white
'''


@pytest.mark.parametrize("nodes", [1, 3])
def test_csv_has_the_node_of_each_class(calibrate, held_out, tmp_path, capsys, nodes):
    """Names that CSV, HTML and shells read otherwise come back as the file of the tree has them."""
    (tmp_path / "odd.csv").write_text(ODD, encoding="utf-8")
    flags = ("--tree", tmp_path / "odd.csv", "--alpha", "0.1", "--max-nodes", nodes)
    status, output, printed = calibrate(*flags, output=f"odd{nodes}.onnx")
    assert status == 0, printed.err
    tree = read_tree(tmp_path / "odd.csv", NAMES)
    images = sorted(held_out.rglob("*.png"))[::7]
    found = Predictor(output, device="cpu")(images)
    assert len({name for prediction in found for name in prediction.set_nodes}) > 5
    assert max(len(prediction.set_nodes) for prediction in found) == (1 if nodes == 1 else nodes)
    capsys.readouterr()
    assert main(["predict", str(output), *map(str, images), "--csv", "--device", "cpu"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines(keepends=True)))
    assert list(rows[0])[-1] == "node"
    for image, prediction in zip(images, found, strict=True):
        mine = [row for row in rows if row["file"] == str(image)]
        inside = {row["class"]: row["node"] for row in mine if row["in_set"] == "1"}
        assert set(inside) == {ranked.name for ranked in prediction.set}
        assert set(inside.values()) == set(prediction.set_nodes)
        for name, node in inside.items():
            assert tree.members[tree.names.index(node), NAMES.index(name)]
        assert all(row["node"] == "" for row in mine if row["in_set"] == "0")
    assert main(["predict", str(output), str(images[0]), "--csv", "--device", "cpu"]) == 0
    assert main(["predict", str(output), str(images[0]), "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["set_nodes"] == list(found[0].set_nodes)


def test_csv_without_a_tree_has_no_nodes(calibrate, held_out, capsys):
    status, output, _ = calibrate("--score", "lac")
    assert status == 0
    assert main(["predict", str(output), str(next(held_out.rglob("*.png"))), "--csv", "--device", "cpu"]) == 0
    assert "node" not in capsys.readouterr().out.splitlines()[0]


def test_more_nodes_make_smaller_sets(calibrate, tree_file):
    sizes = []
    for m in (1, 2):
        status, output, printed = calibrate("--tree", tree_file, "--max-nodes", m, "--json", output=f"{m}.onnx")
        facts = json.loads(printed.out)
        assert status == 0
        assert facts["options"] == {"nodes": m}
        assert Predictor(output, device="cpu").run(np.zeros((1, 3, 32, 40), np.float32))["set_nodes"].shape == (1, m)
        low, high = facts["coverage"]["interval"]
        assert low < 0.95
        assert high > 0.9
        sizes.append(facts["report_mean_size"])
    assert sizes[1] < sizes[0]


def test_thresholds_by_group(calibrate, groups_file, held_out, capsys, tmp_path):
    status, output, printed = calibrate("--score", "lac", "--groups", groups_file)
    assert status == 0, printed.err
    assert "promised    within each group the label is in the set with probability at least 0.9" in printed.out
    assert "  day: coverage 0." in printed.out
    assert "note: group rare has " in printed.err
    assert "<h2>Coverage by group</h2>" in output.with_suffix(".html").read_text()
    predictor = Predictor(output, device="cpu")
    groups = {group["name"]: group for group in predictor.metadata.sets["groups"]}
    assert list(groups) == ["day", "night", "rare"]
    assert groups["rare"]["all_classes"]
    assert groups["rare"]["missing"] == 9 - groups["rare"]["samples"]
    assert groups["day"]["threshold"] != groups["night"]["threshold"]
    images = sorted(held_out.rglob("*.png"))[::17]
    batch = predictor.preprocess(images)
    p = probabilities(predictor.run(batch)["logits"].astype(np.float64))
    for number, name in enumerate(("day", "night")):
        inside = Predictor(output, device="cpu", group=name).run(batch)["set"]
        limit = groups[name]["threshold"]
        best = p == p.max(-1, keepdims=True)
        near = abs(1 - p - limit) < 1e-6
        assert ((inside == ((1 - p <= limit) | best)) | near).all()
        np.testing.assert_array_equal(predictor.run(batch, np.full(len(batch), number))["set"], inside)
    assert predictor.run(batch)["set"].all()  # no group told: the largest threshold, here that of too few samples
    assert verify(output, device="cpu")["passed"]
    with pytest.raises(ModelFileError, match="calibration has seen no group 'dusk'; there are day, night, rare"):
        Predictor(output, device="cpu", group="dusk")
    with pytest.raises(ValueError, match="expected a group from 0 to 2"):
        predictor.run(batch, np.full(len(batch), 3))
    capsys.readouterr()
    assert main(["predict", str(output), str(images[0]), "--group", "night", "--device", "cpu"]) == 0
    assert "note" not in capsys.readouterr().err
    assert main(["predict", str(output), str(images[0]), "--device", "cpu"]) == 0
    assert "note: sets have the largest threshold of all groups; --group takes one of day" in capsys.readouterr().err
    assert main(["predict", str(output), str(images[0]), "--group", "dusk", "--device", "cpu"]) == 1


def test_each_group_covers_its_calibration_to_the_last_sample(colours_file, held_out, groups_file, tmp_path):
    samples = with_groups(open_folder(held_out, NAMES), groups_file, folder=held_out)
    found = calibrate_file(colours_file, tmp_path / "o.onnx", samples, Plan("tree", tree=_tree(tmp_path)), device="cpu")
    predictor = Predictor(tmp_path / "o.onnx", device="cpu")
    numbers = np.array([("day", "night", "rare").index(group) for group in samples.groups])
    out = predictor.run(predictor.preprocess(samples.images), numbers)
    hit = out["set"][np.arange(360), samples.labels]
    order = np.random.default_rng(0).permutation(360)
    report, calibration = order[:180], order[180:]
    for g, group in enumerate(found.groups):
        mine = calibration[numbers[calibration] == g]
        assert group.samples == len(mine)
        if not group.missing:
            assert hit[mine].sum() >= math.ceil((len(mine) + 1) * 9 / 10)
        assert group.hits == hit[report[numbers[report] == g]].sum()


def _tree(folder):
    (folder / "t.csv").write_text(TREE)
    return read_tree(folder / "t.csv", NAMES)


def test_what_does_not_go_together_is_told(calibrate, tree_file, groups_file, tmp_path):
    wrong = tmp_path / "wrong.csv"
    wrong.write_text(TREE.replace("black,dark\n", ""))
    cases = {
        ("--score", "tree"): "score tree needs the tree of the classes: pass --tree FILE",
        ("--rule", "per-node"): "rule per-node needs the tree",
        ("--score", "lac", "--tree", tree_file): "a tree is for score tree or rule per-node",
        ("--tree", tree_file, "--rule", "per-class"): "score tree takes no rule per_class",
        ("--tree", wrong): "1 of 12 classes are missing: black",
        ("--max-nodes", "2"): "--max-nodes is of score tree, got score raps",
        ("--group-column", "x"): "--group-column is a column of --groups FILE",
        ("--groups", groups_file, "--group-column", "x"): "expected a column 'x', got image, camera, group",
        ("--groups", groups_file, "--rule", "per-class"): "groups take rule marginal",
    }
    for flags, message in cases.items():
        status, output, printed = calibrate(*flags)
        assert status == 1
        assert message in printed.err
        assert not output.exists()


def test_tables_of_groups_say_the_group_of_every_image(tmp_path, held_out, monkeypatch):
    samples = open_folder(held_out, NAMES)
    table = tmp_path / "groups.csv"
    for text, message in {
        "image,group\nred/00.png,a\n": "359 of 360 images have no row: ",
        "image,group\nred/00.png,a\nred/00.png,b\n": "red/00.png is in two groups, a and b",
        "image,group\nred/00.png,\n": "1 rows have no group, the first is line 2",
        "picture,group\nred/00.png,a\n": "expected a column image or file",
    }.items():
        table.write_text(text)
        with pytest.raises(ValueError, match=message):
            with_groups(samples, table, folder=held_out)
    names = [Path(path).relative_to(held_out).as_posix() for path in samples.images]
    table.write_text("file,group\n" + "".join(f"{name},{name[0]}\n" for name in names))
    monkeypatch.chdir(held_out.parent)
    for folder in (held_out, Path(held_out.name)):  # also a relative one
        found = with_groups(open_folder(folder, NAMES), table, folder=folder)
        assert found.groups == tuple(name[0] for name in names)
    table.write_text("group\na\nb\n")
    rows = Samples("data", ["x", "y"], np.array([0, 1]))
    assert with_groups(rows, table, folder=None).groups == ("a", "b")
    with pytest.raises(ValueError, match="expected a row for each of 360 samples, got 2"):
        with_groups(samples, table, folder=None)


def test_rare_classes_take_their_nodes_threshold_in_the_file(calibrate, tree_file):
    status, output, printed = calibrate("--tree", tree_file, "--rule", "per-node", "--score", "lac", "--alpha", "0.05")
    assert status == 0, printed.err
    metadata = Predictor(output, device="cpu").metadata
    assert metadata.sets["rule"] == "per_node"
    assert metadata.sets["classes_in_every_set"] == 0  # 15 samples a class, where a class alone takes 19
    status, _, printed = calibrate("--rule", "per-class", "--score", "lac", "--alpha", "0.05")
    assert status == 0
    assert "classes have too few samples for a threshold of their own" in printed.err
