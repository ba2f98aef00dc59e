"""``topk-registry score``: what it writes, from every kind of source, and what it refuses."""

import io
import json
import os
import re
import sys
import tarfile

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.export.colours import COLOURS, K
from tests.export.scoring.conftest import parts, rows
from topk_export import ImageError, Predictor, check_column
from topk_export.commands import score
from topk_export.errors import OutputError, SourceError
from topk_export.runtime.weights import digest_of
from topk_export.scoring import files, work
from topk_export.scoring.sources import shards_of
from topk_registry import registry
from topk_registry.registry.errors import BrokenPluginError, UnknownPluginError


@pytest.mark.slow
def test_rows_are_the_predictions_of_the_file(run, folder, model_file):
    status, output, printed = run(folder, "--shard-size", "7")
    assert status == score.HAS_ERRORS
    assert "30 images in 5 files" in printed
    assert "left out of folders, by their names: 1 .txt" in printed
    assert "2 rows hold an error" in printed
    found, paths = rows(output), sorted(folder.glob("*.png"))
    assert [row["path"] for row in found] == list(map(str, paths))
    expected = Predictor(model_file, device="cpu", threads=1).predict(paths, on_error="yield")
    for row, prediction in zip(found, expected, strict=True):
        if isinstance(prediction, ImageError):
            assert row.pop("path")
            assert row.pop("error") == str(prediction)
            assert set(row.values()) == {None}
            continue
        assert row["index"] == [ranked.index for ranked in prediction.top]
        assert row["class"] == [ranked.name for ranked in prediction.top]
        # the batches are others than predict's
        np.testing.assert_allclose(row["marginal"], [ranked.marginal for ranked in prediction.top], rtol=1e-5)
        assert row["logit"] == sorted(row["logit"], reverse=True)
        assert len(row["logit"]) == K
        assert row["set"] is row["set_size"] is row["error"] is None
    assert [row["class"][0] for row in found[:12]] == list(COLOURS)


@pytest.fixture
def labelled(tmp_path, folder):
    """``labelled("c{}")``: a folder for each colour, named by its number in the order of the classes."""

    def made(name):
        root = tmp_path / "labelled"
        for i, colour in enumerate(COLOURS):
            (root / name.format(i)).mkdir(parents=True)
            for path in folder.glob(f"*-{colour}.png"):
                path.rename(root / name.format(i) / path.name)
        return root

    return made


def test_folders_are_labels_where_asked(run, labelled):
    """c2 comes before c10, as it did in training."""
    source = labelled("c{}")
    status, output, printed = run(source, "--labels", "--shard-size", "7")
    assert status == 0, printed
    assert f"{len(COLOURS)} classes in order, as no name is the same: c0 = " in printed
    assert "top-1 accuracy 100.0% of 28 images" in printed
    assert all(row["label"] == list(COLOURS).index(row["path"].rpartition("-")[2][:-4]) for row in rows(output))


def test_labels_that_look_wrong_or_cannot_be_told(run, labelled, tars):
    source = labelled("{:02}")
    moved = source.rename(source.with_name("moved"))
    for i in range(len(COLOURS)):
        (moved / f"{i:02}").rename(moved / f"x{(i + 1) % len(COLOURS)}")
    with_labels = (moved, "--labels")
    assert run(*with_labels, "--force")[0] == 0
    status, _, printed = run(*with_labels)
    assert status == 1
    assert "error: top-1 accuracy is 0.0% on 28 images, where chance has 8.3%" in printed
    (moved / "x0").rename(moved / next(iter(COLOURS)))
    status, output, printed = run(*with_labels, output="other")
    assert (status, output.exists()) == (1, False)
    assert "the data has the classes 'x1', 'x2'" in printed
    assert "--labels takes the folders of images for classes" in run(tars, "--labels", output="tars")[2]


def test_all_classes_and_another_number_of_the_best(run, folder, predictor):
    _, output, _ = run(folder, "--all-classes", "--top", "2")
    first = rows(output)[0]
    outputs = predictor.run(predictor.preprocess([sorted(folder.glob("*.png"))[0]]))
    np.testing.assert_allclose(first["logits"], outputs["logits"][0], rtol=1e-5)
    np.testing.assert_allclose(first["marginals"], outputs["marginals"][0], rtol=1e-5, atol=1e-7)
    assert [first["logits"][i] for i in first["index"]] == first["logit"]
    assert len(first["index"]) == 2


@pytest.mark.parametrize("kind", ["list", "tar", "folder of tars", "pattern", "bytes", "path", "struct", "url"])
def test_every_kind_of_source_gives_the_same_scores_in_the_same_order(
    kind, run, folder, tars, table, tmp_path, contents
):
    listed = tmp_path / "list.txt"
    listed.write_text("\n".join(contents) + "\n\n")
    argv = {
        "list": lambda: [listed, "--root", folder],
        "tar": lambda: sorted(tars.glob("*.tar")),
        "folder of tars": lambda: [tars],
        "pattern": lambda: [f"{tars}/{{000..002}}.tar"],
        "bytes": lambda: [table("bytes")],
        "path": lambda: [table("path"), "--root", folder],
        "struct": lambda: [table("struct")],
        "url": lambda: [f"file://{folder}"],
    }[kind]()
    status, output, _ = run(*argv)
    assert status == score.HAS_ERRORS
    run(folder, output="expected")
    found, expected = rows(output), rows(tmp_path / "expected")
    assert len(found) == 30
    # tar shards make other batches than one shard of all
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["class"] == theirs["class"]
        assert (ours["error"] is None) == (theirs["error"] is None)
        if ours["logit"] is not None:
            np.testing.assert_allclose(ours["logit"], theirs["logit"], rtol=1e-5, atol=1e-5)


def test_a_list_from_standard_input_and_scores_to_a_url(run, folder, contents, monkeypatch, tmp_path):
    names = "\n".join(str(folder / name) for name in contents)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(names.encode())))
    monkeypatch.setattr("topk_export.scoring.sources._kept", [])
    status, near, _ = run("-")
    assert status == score.HAS_ERRORS
    assert len(rows(near)) == 30
    assert run("-", output=f"file://{tmp_path}/far")[0] == score.HAS_ERRORS
    assert parts(tmp_path / "far") == parts(near)


def test_what_is_finished_is_not_done_again(run, folder, monkeypatch):
    _, output, _ = run(folder, "--shard-size", "7")
    before = parts(output)
    (output / "part-000002.parquet").unlink()
    (output / "part-000003.parquet.0123.tmp").write_bytes(b"left by a killed worker")
    done = []
    monkeypatch.setattr("topk_export.scoring.driver.score_shard", lambda job: done.append(job) or work.score_shard(job))
    status, _, printed = run(folder, "--shard-size", "7")
    assert [job.number for job in done] == [2]
    assert "4 of them by an earlier call" in printed
    assert status == score.HAS_ERRORS
    assert parts(output) == before


def test_errors_can_be_tried_again(run, folder, monkeypatch):
    def fails(image):
        raise ImageError(f"{image} cannot be fetched")

    with monkeypatch.context() as network:
        network.setattr(work, "load", fails)
        _, output, printed = run(folder, "--shard-size", "7")
    assert "30 rows hold an error" in printed
    assert "30 rows hold an error" in run(folder, "--shard-size", "7")[2]
    assert "2 rows hold an error" in run(folder, "--shard-size", "7", "--retry-errors")[2]
    assert [row["class"][0] for row in rows(output)[:2]] == ["black", "white"]


def archive(content: bytes) -> bytes:
    """A tar file of one image."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as made:
        info = tarfile.TarInfo("a.png")
        info.size = len(content)
        made.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@pytest.mark.parametrize("source", ["folder", "list", "tar", "url", "tar url"])
@pytest.mark.parametrize("flag", [(), ("--checksum",)], ids=["", "checksum"])
def test_a_source_of_another_content_and_the_same_name_and_size_is_done_again(
    source, flag, run, folder, tars, contents, tmp_path
):
    """tar pads archives to 10 KB, and pictures of one size may have as many bytes."""
    changed, before, content = folder / "03-green.png", contents["03-green.png"], contents["02-red.png"]
    if source in ("tar", "tar url"):
        changed, before, content = tars / "001.tar", archive(contents["03-green.png"]), archive(contents["02-red.png"])
    size = max(len(before), len(content))
    before, content = before.ljust(size, b"\0"), content.ljust(size, b"\0")
    changed.write_bytes(before)
    (tmp_path / "list.txt").write_text("\n".join(map(str, sorted(folder.glob("*.png")))))
    argv = {
        "folder": [folder],
        "list": [tmp_path / "list.txt"],
        "tar": [tars],
        "url": [f"file://{folder}"],
        "tar url": [f"file://{tars}"],
    }[source]
    argv += ["--shard-size", "7", *flag]
    _, output, _ = run(*argv)
    files_before, time = parts(output), changed.stat().st_mtime_ns
    changed.write_bytes(content)
    os.utime(changed, ns=(time, time + (0 if flag else 1_000_000)))
    _, _, printed = run(*argv)
    assert "1 again as their sources have changed" in printed
    after = parts(output)
    number = 1 if source in ("tar", "tar url") else 0
    assert [name for name in after if after[name] != files_before[name]] == [f"part-{number:06d}.parquet"]
    assert "again" not in run(*argv)[2]


def test_checksums_tell_by_content_alone(run, folder):
    _, output, _ = run(folder, "--checksum")
    before = parts(output)
    for path in folder.iterdir():
        os.utime(path, ns=(1, 1))
    assert "again" not in run(folder, "--checksum")[2]
    assert parts(output) == before
    status, _, printed = run(folder)
    assert status == 1
    assert "was made with other checksum: name another --output" in printed


def test_two_commands_do_not_share_an_output(run, folder, tmp_path):
    (tmp_path / "scores").mkdir()
    with files.held(str(tmp_path / "scores")):
        status, output, printed = run(folder)
        assert status == 1
        assert f"error: process {os.getpid()} on " in printed
        assert f"writes into {output} now: wait for it, or name another --output" in printed
    assert not list(output.iterdir())
    assert run(folder)[0] == score.HAS_ERRORS
    assert [path.name for path in output.iterdir()] == ["part-000000.parquet"]


def test_a_lock_of_a_process_that_was_killed_holds_nobody(run, folder, tmp_path):
    (tmp_path / "scores").mkdir()
    (tmp_path / "scores" / files.LOCK).write_text("process 1 on elsewhere")
    assert run(folder)[0] == score.HAS_ERRORS


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_half_that_another_command_removed_is_told(scheme, tmp_path):
    def written():
        with files.written_whole(f"{scheme}{tmp_path}/part") as file:
            file.write(b"half")
            next(tmp_path.iterdir()).unlink()

    with pytest.raises(OutputError, match="another command writes into the same output"):
        written()


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is a full disk there")
def test_a_full_disk_names_the_file(run, folder, monkeypatch):
    real = open
    monkeypatch.setattr(
        files, "open", lambda name, mode: real("/dev/full" if "w" in mode else name, mode), raising=False
    )
    status, output, printed = run(folder)
    assert status == 1
    assert f"No space left on device: '{output}/part-000000.parquet'" in printed
    assert "Go on with\n  topk-registry score " in printed


@pytest.mark.parametrize("change", ["options", "images", "model", "fewer"])
def test_scores_of_something_else_are_not_mixed_in(change, run, folder, edited):
    _, output, _ = run(folder, "--shard-size", "7")
    before, options = parts(output), {}
    argv = [folder, "--shard-size", "7"]
    if change == "options":
        argv += ["--top", "1"]
    elif change == "images":
        (folder / "03-green.png").unlink()
    elif change == "model":
        options["model"] = edited(props={"licence": "another"})
    else:
        argv = [folder, "--shard-size", "50"]
    status, _, printed = run(*argv, **options)
    assert status == 1
    assert "give --overwrite" in printed
    assert parts(output) == before
    assert run(*argv, "--overwrite", **options)[0] == score.HAS_ERRORS
    assert len(rows(output)) == (29 if change == "images" else 30)


def test_a_broken_tar_costs_its_own_shard_alone(run, tars):
    whole = (tars / "001.tar").read_bytes()
    (tars / "001.tar").write_bytes(whole[: len(whole) // 2 + 100])
    status, output, printed = run(tars)
    assert status == 1
    assert list(parts(output)) == ["part-000000.parquet", "part-000002.parquet"]
    assert f"{tars}/001.tar cannot be read" in printed
    assert "20 images in 2 files" in printed
    (tars / "001.tar").write_bytes(whole)
    assert run(tars)[0] == score.HAS_ERRORS
    assert len(rows(output)) == 30


def test_outputs_that_are_not_numbers_are_errors(run, folder, edited):
    status, output, _ = run(folder, model=edited(nan=True))
    assert status == score.HAS_ERRORS
    found = rows(output)
    assert all("not finite numbers" in row["error"] for row in found[:28])
    assert found[0]["logit"] is None


def test_prediction_sets_are_given_best_first_and_cut(predictor):
    from topk_export.scoring.rows import Rows, schema

    logits = np.array([[0.0, 3, 1, 2], [5, 0, 0, 0]], np.float32)
    inside = np.array([[True, True, False, True], [False] * 4])

    class Model:
        metadata = predictor.metadata

        def run(self, batch):
            return {"logits": logits, "marginals": logits / 10, "set": inside}

    made = Rows(Model(), schema(full=False, about={}), top=2, max_set=2)
    found = made.of(["a", "bad", "b"], [np.zeros(1), ImageError("why"), np.zeros(1)]).to_pylist()
    assert [row["index"] for row in found] == [[1, 3], None, [0, 1]]
    assert [row["set"] for row in found] == [[1, 3], None, []]
    assert [row["set_size"] for row in found] == [3, None, 0]
    assert [row["error"] for row in found] == [None, "why", None]


def test_files_say_what_they_were_made_of(run, folder, model_file):
    _, output, _ = run(folder)
    about = json.loads(pq.read_schema(output / "part-000000.parquet").metadata[b"topk_registry.score"])
    assert about["model"] == digest_of(model_file)
    assert about["batch_size"] == 32


def test_external_weights_are_part_of_the_model(run, folder, model_file, tmp_path):
    """A file of weights that changes beside the same .onnx is another model."""
    weights, outside = tmp_path / "weights.bin", tmp_path / "outside.onnx"
    onnx.save(onnx.load(model_file), outside, save_as_external_data=True, location=weights.name, size_threshold=100)
    assert run(folder, model=outside)[0] == score.HAS_ERRORS
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    work._predictor.cache_clear()
    status, _, printed = run(folder, model=outside)
    assert status == 1
    assert "was made by another model: name another --output" in printed


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda tmp: tmp / "absent", "does not exist|no folder"),
        (lambda tmp: tmp, "holds no images, tar files or Parquet files"),
        (lambda tmp: tmp / "*.tar", "matches no file"),
        (lambda tmp: "nosuch://bucket/a.tar", "nosuch"),
    ],
)
def test_sources_that_are_none(make, message, tmp_path):
    with pytest.raises(SourceError, match=message):
        list(shards_of([str(make(tmp_path))]))


def test_a_table_without_images_names_its_columns(tmp_path):
    pq.write_table(pa.table({"label": [1], "size": [2]}), tmp_path / "a.parquet")
    (shard,) = shards_of([str(tmp_path / "a.parquet")])
    with pytest.raises(SourceError, match="name one of label, size"):
        list(shard.items())


def test_cells_without_an_image_are_errors(tmp_path):
    pq.write_table(pa.table({"image": pa.array([None, b"x"], pa.binary())}), tmp_path / "a.parquet")
    (shard,) = shards_of([str(tmp_path / "a.parquet")])
    (_, first), (name, second) = shard.items()
    assert isinstance(first, ImageError)
    assert (name, second) == (f"{tmp_path}/a.parquet/1", b"x")


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a{8..11}.tar", ["a8.tar", "a9.tar", "a10.tar", "a11.tar"]),
        ("a{08..10}.tar", ["a08.tar", "a09.tar", "a10.tar"]),
        ("{x,y}/{0..1}.tar", ["x/0.tar", "x/1.tar", "y/0.tar", "y/1.tar"]),
        ("plain.tar", ["plain.tar"]),
        ("odd{name}.tar", ["odd{name}.tar"]),
    ],
)
def test_braces(pattern, names):
    assert files.expanded(pattern) == names


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    for name in (str(tmp_path / "local"), f"file://{tmp_path}/far"):
        with pytest.raises(TypeError), files.written_whole(name) as file:
            file.write("half of it, and then an error")
        assert not list(tmp_path.iterdir())
        with files.written_whole(name) as file:
            file.write(b"whole")
        assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"whole"]
        next(tmp_path.iterdir()).unlink()


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are text there")
def test_names_of_any_bytes_are_written(run, folder, contents):
    (folder / os.fsdecode(b"\xff-odd.png")).write_bytes(contents["00-black.png"])
    _, output, _ = run(folder)
    assert rows(output)[-1]["path"].endswith("\\xff-odd.png")


class Lead:
    """How far the best logit is ahead of the second."""

    type = "float32"

    def __init__(self, metadata):
        assert metadata.num_classes == 12

    def __call__(self, outputs):
        return np.diff(np.sort(outputs["logits"], -1)[:, -2:], axis=-1)[:, 0]


class TooFew(Lead):
    def __call__(self, outputs):
        return super().__call__(outputs)[1:]


class NoType(Lead):
    type = "a number"


class Words(Lead):
    def __call__(self, outputs):
        return ["no number"] * len(outputs["logits"])


class LooksAround(Lead):
    def __call__(self, outputs):
        return super().__call__(outputs) - outputs["logits"].max(initial=0.0)


@pytest.fixture
def column(monkeypatch):
    """``column(factory)``: the plug-in of the column ``lead``, for this test."""

    def register(factory):
        monkeypatch.setitem(registry.columns._registered, "lead", factory)

    return register


def test_a_plug_ins_column_is_written_beside_ours(run, folder, column):
    column(Lead)
    status, output, _ = run(folder, "--column", "lead", "--all-classes")
    assert status == score.HAS_ERRORS
    found = rows(output)
    for row in found[:28]:
        first, second = sorted(row["logits"])[:-3:-1]
        assert row["lead"] == pytest.approx(first - second, rel=1e-5)
    assert [row["lead"] for row in found[28:]] == [None, None]
    about = json.loads(pq.read_schema(output / "part-000000.parquet").metadata[b"topk_registry.score"])
    assert about["columns"] == {"lead": ""}  # of no distribution, but of this process


def test_files_without_a_plug_ins_column_are_those_of_before(run, folder):
    _, output, _ = run(folder)
    about = json.loads(pq.read_schema(output / "part-000000.parquet").metadata[b"topk_registry.score"])
    assert "columns" not in about


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        (TooFew, "gave 1 values for 2 images"),
        (NoType, "must have an attribute type that is Arrow's name of one, such as 'float32', got 'a number'"),
        (Words, "column 'lead' gave what is no float32"),
    ],
)
def test_a_wrong_column_is_told_before_an_image_is_read(run, folder, column, factory, said):
    column(factory)
    with pytest.raises(BrokenPluginError, match=re.escape(said)):
        run(folder, "--column", "lead")
    with pytest.raises(AssertionError):
        check_column(factory, num_classes=12)


def test_a_column_looks_at_one_image_at_a_time():
    check_column(Lead, num_classes=12)
    with pytest.raises(AssertionError, match="the same value for an image alone and among others"):
        check_column(LooksAround, num_classes=12)


def test_a_column_that_is_ours_or_nobodys_is_one_line(run, folder):
    assert "'logit' is a column of every file of scores" in run(folder, "--column", "logit")[2]
    with pytest.raises(UnknownPluginError, match="no column is called 'lead'"):
        run(folder, "--column", "lead")
