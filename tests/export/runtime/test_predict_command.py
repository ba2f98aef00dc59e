"""``topk-registry predict``."""

import csv
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from tests.export.colours import COLOURS, K
from topk_export import ImageError, Predictor, serve
from topk_export.commands import predict
from topk_export.runtime.preprocess import FORMATS, readable_formats
from topk_export.runtime.ranking import Ranked
from topk_export.serve.answers import RankedClass


@pytest.fixture
def run(model_file, capsys):
    def call(*flags: object) -> tuple[int, str, str]:
        status = predict.main([str(model_file), "--device", "cpu", *map(str, flags)])
        return status, *capsys.readouterr()

    return call


def lines(out: str) -> list[dict]:
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.slow
def test_the_table(run, picture):
    path = picture("orange")
    status, out, err = run(path)
    assert (status, err) == (0, "")
    title, heads, *rows = out.splitlines()
    assert title == str(path)
    assert heads.split() == ["marginal", "softmax", "class"]
    assert len(rows) == K
    marginal, share, name = rows[0].split()
    assert name == "orange"
    assert 0 < float(share) <= float(marginal) <= 1


def test_the_table_with_a_set(run, picture):
    status, out, _ = run(picture("brown"), "--softmax-mass", "0.9")
    assert status == 0
    line = out.splitlines()[-1].strip()
    count, _, names = line.partition(" with softmax 0.")
    assert names.partition(": ")[2].split(", ")[0] == "brown"
    assert len(names.partition(": ")[2].split(", ")) == int(count)


def test_json(run, picture):
    paths = [picture("red"), picture("blue")]
    status, out, _ = run(*paths, "--json", "--softmax-mass", "0.5")
    assert status == 0
    answers = lines(out)
    assert [answer["file"] for answer in answers] == list(map(str, paths))
    assert [answer["top"][0]["name"] for answer in answers] == ["red", "blue"]
    assert all(sum(ranked["softmax"] for ranked in answer["softmax_set"]) >= 0.5 for answer in answers)


def test_each_number_has_one_name(run, picture):
    """The table, CSV, JSON, the service's answer and its page call the two numbers alike."""
    path = picture("green")
    numbers = ["marginal", "softmax"]
    table, csv, answer = (run(path, *flags)[1] for flags in ((), ("--csv",), ("--json",)))
    assert table.splitlines()[1].split()[:2] == numbers
    assert [name for name in csv.splitlines()[0].split(",") if name in numbers] == numbers
    assert list(lines(answer)[0]["top"][0]) == ["index", "name", *numbers]
    assert list(RankedClass.model_fields) == ["index", "name", *numbers]
    page = (Path(serve.__file__).parent / "page.html").read_text(encoding="utf-8")
    assert all(f'cell("{name}", item.{name})' in page for name in numbers)


def test_the_name_of_version_0_1_warns():
    with pytest.warns(DeprecationWarning, match="now called softmax"):
        assert Ranked(0, "red", 0.9, 0.5).probability == 0.5


@pytest.mark.parametrize("names", [("red", "blue", "pink"), None], ids=["by name", "by order"])
def test_folders_are_labels_where_asked(run, picture, tmp_path, names):
    """Folders without the names of classes stand for them in natural order: c2 comes before c10."""
    for i, colour in enumerate(COLOURS):
        if names is None or colour in names:
            folder = tmp_path / "labelled" / (colour if names else f"c{i}")
            folder.mkdir(parents=True)
            picture(colour).rename(folder / "a.png")
    status, out, err = run(tmp_path / "labelled", "--labels", "--json")
    assert status == 0, err
    told, accuracy = err.splitlines()
    assert told.startswith("3 classes by name" if names else f"{len(COLOURS)} classes in order")
    assert accuracy == f"top-1 accuracy 100.0% of {len(lines(out))} images, top-{K} 100.0%"


def test_labels_that_look_wrong_end_the_command(run, picture, tmp_path):
    for colour, folder in (("red", "blue"), ("blue", "red")):
        (tmp_path / "labelled" / folder).mkdir(parents=True)
        picture(colour).rename(tmp_path / "labelled" / folder / "a.png")
    status, out, err = run(tmp_path / "labelled", "--labels", "--json")
    assert (status, len(lines(out))) == (1, 2)
    assert "error: top-1 accuracy is 0.0% on 2 images" in err
    assert run(tmp_path / "labelled", "--labels", "--force")[0] == 0
    (tmp_path / "labelled" / "red").rename(tmp_path / "labelled" / "new")
    status, out, err = run(tmp_path / "labelled", "--labels")
    assert (status, out) == (1, "")
    assert "the data has the classes 'new'" in err


def test_csv(run, picture):
    status, out, _ = run(picture("red", 'a,"b".png'), picture("pink"), "--csv")
    assert status == 0
    rows = list(csv.DictReader(io.StringIO(out)))
    assert len(rows) == 2 * K
    assert rows[0]["file"].endswith('a,"b".png')
    assert [row["rank"] for row in rows[:K]] == [str(i + 1) for i in range(K)]
    assert rows[K]["class"] == "pink"
    assert {row["in_top_k"] for row in rows} == {"1"}
    assert {row["in_set"] for row in rows} == {""}


def test_csv_with_a_set_larger_than_k(run, picture):
    _, out, _ = run(picture("grey"), "--csv", "--softmax-mass", "1")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert len(rows) == len(COLOURS)
    assert [row["in_top_k"] for row in rows] == ["1"] * K + ["0"] * (len(COLOURS) - K)
    assert {row["in_softmax_set"] for row in rows} == {"1"}
    assert {row["in_set"] for row in rows} == {""}


def test_folders_are_searched_in_order(run, picture, tmp_path):
    picture("red", "many/b.png")
    picture("blue", "many/deep/a.JPG")
    status, out, err = run(tmp_path / "many", "--json", "--batch-size", "1")
    assert (status, err) == (0, "")
    assert [answer["top"][0]["name"] for answer in lines(out)] == ["red", "blue"]


def test_files_of_a_folder_that_are_left_out_are_counted(run, picture, tmp_path):
    picture("red", "many/b.png")
    for name in ("notes.txt", "more.txt", "README", "._b.png", "c.mp4"):
        (tmp_path / "many" / name).write_text("no image")
    (tmp_path / "many" / ".git").mkdir()
    status, out, err = run(tmp_path / "many", "--json")
    assert status == 0
    assert len(lines(out)) == 1
    assert err == "left out of folders, by their names: 2 .txt, 2 hidden, 1 .mp4, 1 without an ending\n"


@pytest.mark.parametrize(("name", "kind"), [("a.jfif", "JPEG"), ("a.JFIF", "JPEG"), ("a.avif", "AVIF")])
def test_photographs_of_less_common_endings_are_found(run, tmp_path, name, kind):
    if kind not in FORMATS:
        pytest.skip(f"this Pillow knows no {kind}")
    (tmp_path / "many").mkdir()
    Image.new("RGB", (60, 50), COLOURS["turquoise"]).save(tmp_path / "many" / name, kind)
    status, out, err = run(tmp_path / "many", "--json")
    assert (status, err) == (0, "")
    assert [answer["top"][0]["name"] for answer in lines(out)] == ["turquoise"]


def test_heic_is_known_where_pillow_heif_is_installed(monkeypatch):
    registered = {}
    monkeypatch.setattr(Image, "registered_extensions", lambda: {".jpg": "JPEG", **registered})
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    assert readable_formats() == ("JPEG",)
    fake = SimpleNamespace(register_heif_opener=lambda: registered.update({".heic": "HEIF", ".heif": "HEIF"}))
    monkeypatch.setitem(sys.modules, "pillow_heif", fake)
    assert readable_formats() == ("JPEG", "HEIF")


@pytest.mark.parametrize("form", ["-", "list.txt"])
def test_a_list_names_images(run, picture, tmp_path, monkeypatch, form):
    paths = [picture("red"), picture("blue")]
    content = "".join(f"{path}\n\n" for path in paths)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
    monkeypatch.setattr("topk_export.scoring.sources._kept", [])
    (tmp_path / "list.txt").write_text(content)
    status, out, err = run(form if form == "-" else tmp_path / form, "--json")
    assert (status, err) == (0, "")
    assert [answer["file"] for answer in lines(out)] == list(map(str, paths))


def test_a_list_that_names_nothing_is_an_error(run, tmp_path):
    (tmp_path / "list.txt").write_text("\n")
    status, out, err = run(tmp_path / "list.txt")
    assert (status, out, err) == (1, "", f"error: the list {tmp_path}/list.txt names no images\n")


def test_a_url_is_no_path(run, predictor, tmp_path):
    url = "https://images.example/cat.jpg"
    (tmp_path / "list.txt").write_text(f"{url}\n")
    for name in (url, tmp_path / "list.txt"):
        status, out, err = run(name)
        assert (status, out) == (1, "")
        assert err.startswith(f"error: {url} is a URL, and predict reads files")
    with pytest.raises(ImageError, match=f"{url} is a URL, and only files are read here"):
        predictor([url])


def test_progress_is_counted_for_a_person(run, picture, tmp_path, monkeypatch):
    for i in range(3):
        picture("red", f"many/{i}.png")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    _, out, err = run(tmp_path / "many", "--json")
    assert err == "\r1/3 images\r2/3 images\r3/3 images\n"
    assert len(lines(out)) == 3


def test_a_folder_without_images_is_an_error(run, tmp_path):
    status, out, err = run(tmp_path)
    assert (status, out) == (1, "")
    assert err.startswith(f"error: {tmp_path} holds no images (.")
    assert ".jfif" in err


@pytest.mark.parametrize("form", ["--json", "--csv", None])
def test_a_broken_image_is_told_and_the_others_go_on(run, picture, tmp_path, form):
    good = picture("green", "many/b.png")
    picture("green", "many/a.png").write_bytes(good.read_bytes()[:60])
    status, out, err = run(tmp_path / "many", *([form] if form else []))
    assert status == 1
    assert "a.png cannot be decoded" in err
    assert "green" in out
    if form == "--json":
        broken, whole = lines(out)
        assert "cannot be decoded" in broken["error"]
        assert whole["top"][0]["name"] == "green"


def test_outputs_that_are_not_numbers_are_told(edited, picture, capsys):
    assert predict.main([str(edited(nan=True)), str(picture("red")), "--device", "cpu", "--json"]) == 1
    out, err = capsys.readouterr()
    assert "not finite numbers" in json.loads(out)["error"]
    assert "red.png: the model's outputs for this image are not finite numbers" in err


def test_json_that_is_interrupted_is_whole_lines(run, picture, monkeypatch):
    paths = [picture("red"), picture("blue")]
    real = Predictor.stream

    def interrupted(self, images, **options):
        yield next(real(self, images, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(Predictor, "stream", interrupted)
    status, out, err = run(*paths, "--json")
    assert (status, err) == (130, "interrupted\n")
    (answer,) = lines(out)
    assert answer["file"] == str(paths[0])


def test_a_file_that_cannot_be_ranked_is_refused_before_any_image(edited, capsys, tmp_path):
    assert predict.main([str(edited(outputs=("indices",))), str(tmp_path / "gone.jpg"), "--device", "cpu"]) == 1
    assert "exported without logits and marginals" in capsys.readouterr().err


def test_errors_are_one_line(capsys, edited, picture, tmp_path):
    image = str(picture("red"))
    for model, message in (
        (tmp_path / "gone.onnx", "does not exist"),
        (edited(props={"schema": None}), "carries no topk_registry metadata"),
        (edited(props={"schema": "topk_registry.classifier/2"}), "upgrade topk-registry"),
    ):
        assert predict.main([str(model), image, "--device", "cpu"]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: ")
        assert message in err
        assert err.count("\n") == 1
    assert predict.main([str(edited(batch=2)), image, "--device", "cpu", "--require-gpu"]) == 1
    assert "wanted a GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags", [["--softmax-mass", "0"], ["--softmax-mass", "2"], ["--batch-size", "0"], ["--json", "--csv"]]
)
def test_wrong_flags_are_usage_errors(run, picture, flags, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(picture("red"), *flags)
    assert capsys.readouterr().err.endswith("; see topk-registry predict --help\n")
