"""``topk-registry predict``."""

import csv
import io
import json

import pytest

from tests.export.colours import COLOURS, K
from topk_export import Predictor
from topk_export.commands import predict


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
    assert heads.split() == ["in", "top", str(K), "softmax", "class"]
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
    assert all(sum(ranked["probability"] for ranked in answer["softmax_set"]) >= 0.5 for answer in answers)


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
    (tmp_path / "many" / "notes.txt").write_text("no image")
    status, out, err = run(tmp_path / "many", "--json", "--batch-size", "1")
    assert (status, err) == (0, "")
    assert [answer["top"][0]["name"] for answer in lines(out)] == ["red", "blue"]


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
    assert err.startswith(f"error: {tmp_path} holds no images (.bmp, ")


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
