"""The predict command: formats, exit status, class lists, escapes, and Parquet that survives kill -9."""

import csv
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest

from tests.deploy.files import COLORS, NAMES, as_image
from topk_export import ClassScore, Prediction, Predictor
from topk_export.commands.predict import main
from topk_export.errors import printable
from topk_export.predict import chosen_classes, find_images, predict_to_parquet, write_csv, write_table

GREY = NAMES[-1]


@pytest.fixture
def pictures(tmp_path):
    """A folder with one image per color, one of them in a folder below, and a file that is no image."""
    folder = tmp_path / "pictures"
    (folder / "below").mkdir(parents=True)
    for i, color in enumerate(COLORS.values()):
        place = folder / "below" if i == 2 else folder
        as_image(color).save(place / f"{i}.png")
    (folder / "notes.md").write_text("no image")
    return folder


def run(capsys, *argv):
    status = main([str(arg) for arg in argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def lines_of(text):
    return [json.loads(line) for line in text.splitlines()]


def test_table(capsys, set_file, pictures):
    status, out, _ = run(capsys, set_file, pictures)
    assert status == 0
    blocks = out.split(f"{pictures}/")[1:]
    assert len(blocks) == len(COLORS)
    (green,) = (block.splitlines() for block in blocks if block.startswith("3.png"))
    assert green[1].split() == ["class", "probability", "marginal"]
    (expected,) = Predictor(set_file, device="cpu").predict([pictures / "3.png"])
    rank, name, probability, marginal = green[2].split()
    assert (rank, name) == ("1", "green")
    assert float(probability) == pytest.approx(expected.top[0].probability, abs=5e-5)
    assert float(marginal) == pytest.approx(expected.top[0].marginal, abs=5e-5)
    assert green[1].index("probability") + len("probability") == green[2].index(probability) + len(probability)
    assert green[3].startswith("  set of")
    assert "\u202e" not in out
    assert printable(GREY) in out


def test_json_csv_and_parquet_agree(capsys, set_file, pictures, tmp_path):
    (pictures / "broken.png").write_bytes(b"\x89PNG nothing")
    status, out, err = run(capsys, set_file, pictures, "--json", "-")
    assert status == 1
    assert "1 of 9" in err
    rows = lines_of(out)
    assert run(capsys, set_file, pictures)[0] == 1  # the table
    expected = Predictor(set_file, device="cpu").predict(find_images([str(pictures)]), on_error="yield", max_set=100)
    for row, result in zip(rows, expected, strict=True):
        if "error" in row:
            assert row["file"].endswith("broken.png")
            continue
        assert [entry["name"] for entry in row["top"]] == [entry.name for entry in result.top]
        assert [entry["index"] for entry in row["set"]] == [entry.index for entry in result.set]
        assert row["set_size"] == result.set_size
    status, out, _ = run(capsys, set_file, pictures, "--csv", "-")
    table = list(csv.DictReader(io.StringIO(out)))
    assert status == 1
    for row in rows:
        mine = [line for line in table if line["file"] == row["file"]]
        if "error" in row:
            assert [line["error"] for line in mine] == [row["error"]]
            continue
        assert {line["class"] for line in mine} == {e["name"] for e in [*row["top"], *row["set"]]}
        assert {line["class"] for line in mine if line["in_set"] == "1"} == {e["name"] for e in row["set"]}
    status, *_ = run(capsys, set_file, pictures, "--output", tmp_path / "out", "--shard-size", 4)
    assert status == 1
    stored = pq.read_table(tmp_path / "out").to_pylist()
    assert len(list((tmp_path / "out").glob("*.parquet"))) == 3
    for row, other in zip(rows, stored, strict=True):
        assert other["file"] == row["file"]
        assert other["error"] == row.get("error")
        if "error" not in row:
            assert other["classes"] == [entry["name"] for entry in row["top"]]
            assert other["set"] == [entry["name"] for entry in row["set"]]
            assert other["probabilities"] == pytest.approx([entry["probability"] for entry in row["top"]])


def test_a_cut_set_leaves_in_set_empty():
    a, b = ClassScore(0, "a", 0.5, 0.9), ClassScore(1, "b", 0.3, 0.8)
    for prediction, column in (
        (Prediction((a, b), (a,), 1), ["1", "0"]),
        (Prediction((a, b), (a,), 2), ["1", ""]),  # b may be in the set
        (Prediction((a, b)), ["", ""]),
    ):
        write_csv([("x.png", prediction)], stream := io.StringIO())
        lines = list(csv.DictReader(io.StringIO(stream.getvalue())))
        assert [line["in_set"] for line in lines] == column
        assert [line["rank"] for line in lines] == ["1", "2"]


def test_a_run_without_results_does_not_block_its_folder(capsys, set_file, pictures, tmp_path):
    status, *_ = run(capsys, set_file, pictures, "--output", tmp_path / "out", "--allow", "reed", "--allow", "pink")
    assert status == 2
    status, *_ = run(capsys, set_file, pictures, "--output", tmp_path / "out", "--allow", "red", "--allow", "pink")
    assert status != 2


def test_lists_and_stdin(capsys, set_file, pictures, tmp_path, monkeypatch):
    listing = tmp_path / "images.txt"
    listing.write_text(f"\ufeff{pictures}/3.png\n\n{pictures}/#missing.png\n", encoding="utf-8")
    status, out, _ = run(capsys, set_file, listing, "--json", "-")
    assert status == 1
    assert [("error" in row, row["file"][-5:]) for row in lines_of(out)] == [(False, "3.png"), (True, "g.png")]
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{pictures}/4.png\n"))
    status, out, _ = run(capsys, set_file, "-", "--json", "-")
    assert lines_of(out)[0]["top"][0]["name"] == "blue"


def test_a_line_of_the_table_has_at_most_10_names_of_a_set(capsys):
    scores = tuple(ClassScore(i, f"name {i}, second name", 0.01, 0.02) for i in range(25))
    for count, words in ((25, "and 15 more"), (11, "and 1 more"), (10, "name 9, second name")):
        write_table([("x.png", Prediction(scores[:1], scores[: min(count, 12)], count))], stream := io.StringIO())
        line = stream.getvalue().splitlines()[-1]
        names = line.removeprefix(f"  set of {count}: ").split(" | ")
        assert names[:10] == [entry.name for entry in scores[:10]]
        assert names[-1] == words
    write_table([("x.png", Prediction(scores[:1], (), 0))], stream := io.StringIO())
    assert stream.getvalue().splitlines()[-1] == "  set of 0: empty"


def test_class_lists(capsys, set_file, pictures, tmp_path):
    names = tmp_path / "names.csv"
    names.write_text("\ufeffred\n\npink\n", encoding="utf-8")
    for given in (["--allow", names], ["--allow", "RED", "--allow", "pink"]):
        _, out, _ = run(capsys, set_file, pictures, "--json", "-", *given)
        for row in lines_of(out):
            entries = [*row["top"], *row["set"]]
            assert {entry["name"] for entry in entries} <= {"red", "pink"}
    status, _, err = run(capsys, set_file, pictures, "--allow", "reed", "--allow", "pink")
    assert status == 2
    assert "'red'" in err
    status, _, err = run(capsys, set_file, pictures, "--allow", "")
    assert status == 2
    assert "no class ''" in err


def test_a_name_is_exact_or_a_part_that_fits_one_class(tmp_path):
    known = ["tench, Tinca tinca", "goldfish, Carassius auratus", "cat", "Catamaran", "tiger cat", "Dog", "dog"]
    assert chosen_classes(["tench, Tinca tinca", "carassius", "cat", "CAT", "tiger"], known) == [
        "tench, Tinca tinca", "goldfish, Carassius auratus", "cat", "tiger cat",
    ]  # fmt: skip
    assert chosen_classes(["Dog", "dog", "cata"], known) == ["Dog", "dog", "Catamaran"]
    for name, words in (
        ("ca", "fits 5 classes: 'tench, Tinca tinca', 'goldfish, Carassius auratus', 'cat', 'Catamaran', 'tiger cat'"),
        ("DOG", "fits 2 classes: 'Dog', 'dog'"),
        ("goldfihs, Carassius auratus", "close names: 'goldfish, Carassius auratus'"),
        (" ", "no class ' '"),
        ("zzz", "has no class 'zzz'$"),
    ):
        with pytest.raises(ValueError, match=words):
            chosen_classes([name], known)
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ValueError, match="empty"):
        chosen_classes([str(tmp_path / "empty.txt")], known)
    (tmp_path / "list.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not UTF-8 text"):
        chosen_classes([str(tmp_path / "list.txt")], known)


@pytest.mark.parametrize("kind", ["fifo", "socket", "device"])
def test_what_is_no_regular_file_does_not_hang(capsys, set_file, tmp_path, kind):
    odd = tmp_path / "odd" / "x.png"
    odd.parent.mkdir()
    as_image(COLORS["red"]).save(tmp_path / "red.png")
    if kind == "fifo":
        os.mkfifo(odd)
    elif kind == "socket":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(odd))
        listener.close()
    else:
        odd.symlink_to("/dev/zero")
    listing = tmp_path / "images.txt"
    listing.write_text(f"{odd}\n{tmp_path / 'red.png'}\n")
    status, out, _ = run(capsys, set_file, listing, "--json", "-")
    assert status == 1
    broken, red = lines_of(out)
    assert broken["error"] == f"{odd} is not a regular file"
    assert red["top"][0]["name"] == "red"


def test_alpha(capsys, set_file, plain_file, pictures):
    def sizes(alpha):
        _, out, _ = run(capsys, set_file, pictures, "--json", "-", "--alpha", alpha)
        return [row["set_size"] for row in lines_of(out)]

    small, large = sizes(0.4), sizes(0.005)
    assert sum(small) < sum(large)
    for file, alpha in ((set_file, 0.6), (plain_file, 0.1)):
        status, out, err = run(capsys, file, pictures, "--alpha", alpha)
        assert status == 2
        assert "alpha" in err
        assert not out


@pytest.mark.parametrize("sources", [["missing.png"], ["empty"], ["nothing.txt"]])
def test_sources_without_images_are_an_error(capsys, set_file, tmp_path, monkeypatch, sources):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "nothing.txt").write_text("\n")
    status, _, err = run(capsys, set_file, *sources)
    assert status == 2
    assert "error" in err


def test_file_names_cannot_control_a_terminal(capsys, set_file, tmp_path):
    bad = tmp_path / "a\x1b]0;owned\x07\nb\u202e.png"
    as_image(COLORS["red"]).save(bad)
    latin = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.png")
    as_image(COLORS["red"]).save(latin)
    status, out, err = run(capsys, set_file, bad, latin)
    assert status == 0
    assert not {"\x1b", "\x07", "\u202e"} & set(out + err)
    assert r"\x1b]0;owned\x07\nb\u202e.png" in out
    status, out, _ = run(capsys, set_file, latin, "--json", "-")
    assert lines_of(out)[0]["file"].endswith(r"\xff.png")
    with open(latin, "wb") as file:
        file.write(b"no image")
    for i, flag in enumerate(("--json", "--csv", "--output")):  # the error contains the name of the file
        assert run(capsys, set_file, latin, flag, tmp_path / f"{i}")[0] == 1
    assert r"\xff.png is not an image" in json.loads((tmp_path / "0").read_text())["error"]


def test_a_forced_calibration_is_named(capsys, set_file, pictures, tmp_path):
    import onnx

    model = onnx.load(set_file)
    (entry,) = (entry for entry in model.metadata_props if entry.key == "sets")
    entry.value = json.dumps(json.loads(entry.value) | {"forced": "calibrated with --force"})
    onnx.save(model, str(tmp_path / "forced.onnx"))
    _, _, err = run(capsys, tmp_path / "forced.onnx", pictures)
    assert "no guarantee" in err


def test_another_run_does_not_mix_with_the_first(capsys, set_file, pictures, tmp_path):
    out = tmp_path / "out"
    assert run(capsys, set_file, pictures, "--output", out)[0] == 0
    status, _, err = run(capsys, set_file, pictures, "--alpha", 0.2, "--output", out)
    assert (status, "options differ" in err) == (2, True)
    for content in ("{", "[1]", None):
        (out / "_run.json").write_text(content) if content else (out / "_run.json").unlink()
        status, _, err = run(capsys, set_file, pictures, "--output", out)
        assert (status, "_run.json" in err) == (2, True)


@pytest.mark.slow
def test_kill_in_the_middle_loses_and_repeats_nothing(set_file, tmp_path):
    """SIGKILL at several moments; the run then continues, and each image has one row."""
    folder, out = tmp_path / "many", tmp_path / "out"
    folder.mkdir()
    for i in range(600):
        as_image(COLORS["red" if i % 2 else "blue"]).save(folder / f"{i:04d}.png")
    (folder / "0333.png").write_bytes(b"broken")
    command = [sys.executable, "-m", "topk_registry", "predict", str(set_file), str(folder), "--output", str(out)]
    command += ["--shard-size", "7", "--batch-size", "4", "--threads", "1", "--workers", "1"]
    done, killed = 0, 0
    for _ in range(8):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        goal, end = done + 11, time.monotonic() + 60
        while process.poll() is None and len(list(out.glob("part-*.parquet"))) < goal and time.monotonic() < end:
            time.sleep(0.002)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            killed += 1
        process.wait()
        done = len(list(out.glob("part-*.parquet")))
        for shard in out.glob("part-*.parquet"):
            pq.read_table(shard)  # complete
    assert killed >= 3
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 1, finished.stderr
    assert "600 images" in finished.stderr
    rows = [row for shard in sorted(out.glob("part-*.parquet")) for row in pq.read_table(shard).to_pylist()]
    assert [row["file"] for row in rows] == [str(folder / f"{i:04d}.png") for i in range(600)]
    for i, row in enumerate(rows):
        assert row["classes"] == (None if i == 333 else [("blue", "red")[i % 2]])
        assert (row["error"] is not None) == (i == 333)


def test_progress_counts_all_images(predictor, pictures, tmp_path):
    seen = []

    def watched(rows, done):
        for row in rows:
            seen.append(row[0])
            yield row

    images = find_images([str(pictures)])
    assert predict_to_parquet(predictor, images, tmp_path / "out", shard_size=3, progress=watched) == (8, 0)
    assert seen == images
