"""``topk-registry score`` of a file with thresholds by group: one for all images, a table, a column of Parquet."""

import csv
import itertools
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.export.colours import COLOURS
from tests.export.groups import GROUPS, expected_sets, grouped
from tests.export.scoring.conftest import parts, rows
from topk_export import Predictor
from topk_export.commands import score
from topk_export.scoring.sources import Groups
from topk_registry.folders.groups import GroupTable

LEFT_OUT = "28-text.png", "29-cut.png"  # no images


@pytest.fixture
def model(model_file, tmp_path):
    return grouped(model_file, tmp_path / "grouped.onnx")


@pytest.fixture
def told(contents):
    """The group of each image, two after the other alike."""
    return dict(zip(contents, itertools.cycle([g for g in GROUPS for _ in range(2)]), strict=False))


@pytest.fixture
def write(tmp_path):
    """``write(rows, column=...)``: a table of groups."""

    def call(pairs, column="group", image="image"):
        path = tmp_path / "groups.csv"
        with path.open("w", newline="", encoding="utf-8") as stream:
            csv.writer(stream).writerows([("station", column, image), *(("x", g, name) for name, g in pairs)])
        return path

    return call


def assert_sets(found, folder, model, groups):
    """Each row has the set of its own group, by the definition, and names the group."""
    good = [row for row in found if row["error"] is None]
    names = [row["path"].rpartition("/")[2] for row in good]
    predictor = Predictor(model, device="cpu", threads=1)
    logits = predictor.run(predictor.preprocess([folder / name for name in names]))["logits"]
    numbers = [GROUPS.index(groups[name]) for name in names]
    inside = expected_sets(logits, numbers)
    assert [row["set_size"] for row in good] == inside.sum(-1).tolist()
    assert len({row["set_size"] for row in good}) > 2
    for row, expected in zip(good, inside, strict=True):
        assert set(row["set"]) == set(np.flatnonzero(expected).tolist())
    for row in found:
        assert row["group"] == groups[row["path"].rpartition("/")[2]]


@pytest.mark.parametrize("below", [True, False])
def test_a_table_tells_the_group_of_each_image(run, folder, model, told, write, below):
    table = write([(name if below else folder / name, group) for name, group in told.items()])
    status, output, printed = run(folder, "--groups", table, "--shard-size", "7", model=model)
    assert status == score.HAS_ERRORS, printed
    assert "note" not in printed
    found = rows(output)
    assert len(found) == 30
    assert list(found[0])[:2] == ["path", "group"]
    assert_sets(found, folder, model, told)
    before = parts(output)
    status, _, printed = run(folder, "--groups", table, "--shard-size", "7", model=model)  # again: nothing is done
    assert "30 of them" not in printed
    assert "5 of them by an earlier call" in printed
    assert parts(output) == before


def test_lists_take_a_table_too(run, folder, model, told, write, tmp_path):
    (tmp_path / "list.txt").write_text("".join(f"{name}\n" for name in told if name not in LEFT_OUT))
    table = write(told.items(), "night or day?", "File")
    flags = ("--groups", table, "--group-column", "night or day?", "--root", folder)
    status, output, printed = run(tmp_path / "list.txt", *flags, model=model)
    assert status == 0, printed
    assert_sets(rows(output), folder, model, told)


def test_parquet_has_a_column_of_groups(run, folder, model, told, contents, tmp_path):
    source = tmp_path / "images.parquet"
    columns = {"path": list(contents), "camera": list(told.values())}
    pq.write_table(pa.table(columns), source, row_group_size=7)
    flags = ("--group-column", "camera", "--root", folder)
    status, output, printed = run(source, *flags, model=model)
    assert status == score.HAS_ERRORS, printed
    assert_sets(rows(output), folder, model, told)
    columns["camera"][2:6] = [None, "", " day ", "dusk"]
    pq.write_table(pa.table(columns), source)
    found = rows(run(source, *flags, model=model, output="odd")[1])
    refused = [row["error"] for row in found[2:6]]
    assert refused[0] == refused[1] == f"expected a group, got none; there are {', '.join(GROUPS)}"
    assert refused[2] is None
    assert refused[3].startswith(f"calibration has seen no group 'dusk'; there are {', '.join(GROUPS)}")
    assert [row["group"] for row in found[2:6]] == [None, None, "day", "dusk"]
    assert found[5]["set"] is found[5]["index"] is None
    assert_sets([row for row in found if row["error"] is None], folder, model, {**told, list(told)[4]: "day"})
    status, _, printed = run(source, "--group-column", "site", "--root", folder, model=model, output="none")
    assert status == 1
    assert "has no column 'site'; there are path, camera" in printed


def test_one_group_for_all_is_in_the_rows_too(run, folder, model, told):
    status, output, _ = run(folder, "--group", GROUPS[1], model=model)
    assert status == score.HAS_ERRORS
    found = rows(output)
    assert {row["group"] for row in found} == {GROUPS[1]}
    predictor = Predictor(model, device="cpu", threads=1, group=GROUPS[1])
    expected = predictor.predict([folder / name for name in told if name not in LEFT_OUT])
    assert [row["set_size"] for row in found if not row["error"]] == [each.set_size for each in expected]


def test_untold_groups_are_noted_and_have_no_column(run, folder, model):
    _, output, printed = run(folder, model=model)
    assert "note: sets have the largest threshold of all groups; --group, --groups or --group-column tells" in printed
    found = rows(output)
    assert "group" not in found[0]
    assert all(len(row["set"]) == len(COLOURS) for row in found if not row["error"])


def test_scores_of_other_groups_are_not_mixed_in(run, folder, model, told, write):
    table = write(told.items())
    flags = (folder, "--shard-size", "7")
    _, output, _ = run(*flags, "--groups", table, model=model)
    before = parts(output)
    names = list(told)
    changed = {**told, names[9]: "day", names[10]: "day"}
    for options, message in {
        ("--group", "day"): "with other group, groups",
        (): "with other groups",
        ("--groups", write(changed.items())): "part-000001.parquet was made with other groups",
    }.items():
        status, _, printed = run(*flags, *options, model=model)
        assert status == 1
        assert message in printed
        assert "give --overwrite" in printed
        assert parts(output) == before
    assert run(*flags, "--groups", write(told.items()), "--overwrite", model=model)[0] == score.HAS_ERRORS
    more = write([*told.items(), ("unused.png", "dusk")])  # rows of no image change nothing
    status, _, printed = run(*flags, "--groups", more, model=model)
    assert "5 of them by an earlier call" in printed


def test_what_tables_lack_is_told_before_an_image_is_read(run, folder, model, model_file, told, write, tars):
    for pairs, message in (
        ([*told.items()][:-2], "2 images have no row: "),
        ([(name, "dusk") for name in told], "calibration has seen no group 'dusk'; there are day, "),
    ):
        table = write(pairs)
        status, output, printed = run(folder, "--groups", table, model=model)
        assert (status, message in printed) == (1, True), printed
        assert not output.exists()
    for text, message in {
        "image,group\na,day\na,night\n": "a is in two groups, day and night",
        "image,group\na,\n": "1 rows have no group, the first is line 2",
        "image,camera\na,day\n": "expected a column 'group', got image, camera",
        "picture,group\na,day\n": "expected a column image or file with paths of the images, got picture, group",
        "": "expected a column 'group', got no columns",
    }.items():
        table.write_text(text)
        status, output, printed = run(folder, "--groups", table, model=model)
        assert (status, message in printed) == (1, True), printed
        assert not output.exists()
    table = write(told.items())
    for source, flags, options, message in (
        (tars, ("--groups", table), {"model": model}, "--groups is of images in folders and lists, and"),
        (tars, ("--group-column", "group"), {"model": model}, "--group-column without --groups is of Parquet files"),
        (folder, ("--group-column", "group"), {"model": model}, "--group-column without --groups is of Parquet files"),
        (folder, ("--groups", table), {}, f"groups of images are for files with thresholds by group, {model_file} has"),
        (folder, ("--groups", folder / "none.csv"), {"model": model}, "none.csv"),
        (folder, ("--group", "dusk"), {"model": model}, "calibration has seen no group 'dusk'"),
    ):
        status, output, printed = run(source, *flags, **options)
        assert (status, message in printed) == (1, True), printed
        assert not output.exists()
    with pytest.raises(SystemExit):
        run(folder, "--group", "day", "--groups", table, model=model)


def test_images_are_found_below_their_folder_or_by_their_name():
    table = GroupTable("t.csv", (), ("a", "b", "c", "d"), ("x/1.png", "/data/2.png", "s3://b/f/3.png", "./y//4.png"))
    groups = Groups(table)
    assert groups.of("photos/x/1.png", "photos/") == "a"
    assert groups.of("/data/2.png", "list.txt") == groups.of("/data/2.png", "-") == "b"
    assert groups.of("s3://b/f/3.png", "s3://b/f") == "c"
    assert groups.of("s3://b/f/x/1.png", "s3://b/f/") == "a"
    assert groups.of("y/4.png", "list.txt") == "d"
    assert groups.missing == []
    assert groups.of("photos/1.png", "photos") == ""
    assert (groups.missing, groups.used) == (["photos/1.png"], set("abcd"))


def test_files_of_scores_say_how_groups_were_told(run, folder, model, told, write):
    about = []
    for flags in (("--groups", write(told.items())), ("--group", "day")):
        output = run(folder, *flags, model=model, output=f"scores{len(about)}")[1]
        content = pq.read_metadata(output / "part-000000.parquet").metadata[b"topk_registry.score"]
        about.append(json.loads(content))
    assert len(about[0]["groups"]) == 64
    assert about[1]["group"] == "day"
    assert "groups" not in about[1]
