"""The page of the service and ``predict`` show the prediction sets of a calibrated file."""

import csv
import io
import json

import pytest

from tests.browser import chromium, complaints
from tests.export.colours import COLOURS, TREE
from tests.export.groups import GROUPS, expected_sets, grouped
from tests.export.serve.service import Service
from topk_export import Predictor
from topk_export.calibration.plan import Plan
from topk_export.calibration.run import calibrate_file
from topk_export.samples import open_folder
from topk_registry.cli.main import main
from topk_registry.folders.trees import read_tree


@pytest.fixture(scope="module")
def calibrated(colours_file, held_out, tmp_path_factory):
    output = tmp_path_factory.mktemp("calibrated") / "model.onnx"
    plan = Plan("lac", 0.2, "per_class")
    calibrate_file(colours_file, output, open_folder(held_out, tuple(COLOURS)), plan, device="cpu")
    return output


@pytest.mark.parametrize("form", ["table", "json", "csv"])
def test_predict(calibrated, held_out, capsys, form):
    images = sorted(held_out.rglob("*.png"))[::60]
    expected = Predictor(calibrated, device="cpu")(images)
    capsys.readouterr()
    flags = [] if form == "table" else [f"--{form}"]
    assert main(["predict", str(calibrated), *map(str, images), "--device", "cpu", *flags]) == 0
    out = capsys.readouterr().out
    names = [[ranked.name for ranked in prediction.set] for prediction in expected]
    if form == "table":
        lines = [line.strip() for line in out.splitlines() if "prediction set" in line]
        assert lines == [f"prediction set of {len(inside)}: {', '.join(inside)}" for inside in names]
    elif form == "json":
        assert [[ranked["name"] for ranked in json.loads(line)["set"]] for line in out.splitlines()] == names
    else:
        rows = list(csv.DictReader(io.StringIO(out)))
        for image, inside in zip(images, names, strict=True):
            assert [row["class"] for row in rows if row["file"] == str(image) and row["in_set"] == "1"] == inside


@pytest.mark.slow
def test_the_page_shows_the_set_and_its_promise(calibrated, held_out, tmp_path):
    image = next(held_out.rglob("*.png"))
    (prediction,) = Predictor(calibrated, device="cpu")([image])
    with Service(calibrated, tmp_path / "log") as service, chromium() as browser:
        from selenium.webdriver.support.ui import WebDriverWait

        browser.get(service.url)
        browser.find_element("id", "file").send_keys(str(image))
        wait = WebDriverWait(browser, 20, poll_frequency=0.05)
        shown = wait.until(lambda b: b.find_element("id", "set").text)
        assert shown == "Prediction set: " + ", ".join(ranked.name for ranked in prediction.set)
        promise = wait.until(lambda b: b.find_element("id", "promise").text)
        assert "within each class the label is in the set with probability at least 0.8" in promise
        assert complaints(browser) == []


@pytest.mark.slow
def test_the_page_shows_nodes(colours_file, held_out, tmp_path):
    (tmp_path / "tree.csv").write_text(TREE)
    plan = Plan("tree", 0.2, tree=read_tree(tmp_path / "tree.csv", tuple(COLOURS)), options={"nodes": 2})
    calibrate_file(colours_file, tmp_path / "tree.onnx", open_folder(held_out, tuple(COLOURS)), plan, device="cpu")
    images = sorted(held_out.rglob("*.png"))[::40]
    found = Predictor(tmp_path / "tree.onnx", device="cpu")(images)
    image, prediction = max(zip(images, found, strict=True), key=lambda pair: len(pair[1].set_nodes))
    with Service(tmp_path / "tree.onnx", tmp_path / "log") as service, chromium() as browser:
        from selenium.webdriver.support.ui import WebDriverWait

        browser.get(service.url)
        browser.find_element("id", "file").send_keys(str(image))
        wait = WebDriverWait(browser, 20, poll_frequency=0.05)
        shown = wait.until(lambda b: b.find_element("id", "nodes").text)
        names = prediction.set_nodes
        assert shown == ("Node: " if len(names) == 1 else "Nodes: ") + " and ".join(names)
        assert complaints(browser) == []


@pytest.mark.slow
def test_a_group_is_chosen_on_the_page(model_file, held_out, tmp_path):
    file = grouped(model_file, tmp_path / "grouped.onnx")
    image = next(held_out.rglob("*.png"))
    predictor = Predictor(file, device="cpu")
    logits = predictor.run(predictor.preprocess([image]))["logits"]
    with Service(file, tmp_path / "log") as service, chromium() as browser:
        from selenium.webdriver.support.ui import Select, WebDriverWait

        browser.get(service.url)
        wait = WebDriverWait(browser, 20, poll_frequency=0.05)
        choice = Select(wait.until(lambda b: b.find_element("id", "group")))
        wait.until(lambda b: len(choice.options) == 1 + len(GROUPS))
        browser.find_element("id", "file").send_keys(str(image))
        wait.until(lambda b: b.find_element("id", "set").text)
        for g, group in enumerate(GROUPS):
            choice.select_by_visible_text(group)
            inside = expected_sets(logits, [g])[0]
            wait.until(
                lambda b, inside=inside: (
                    {name for name, there in zip(COLOURS, inside, strict=True) if there}
                    == set(b.find_element("id", "set").text.removeprefix("Prediction set: ").split(", "))
                )
            )
        assert complaints(browser) == []
