"""``topk-registry plot``: curves of runs and pictures of losses."""

import re

import pytest

from topk_registry.cli.main import main
from topk_studies.engine.registered import numbers_of

pytest.importorskip("matplotlib")
HEADER = "epoch,train_loss,eval_top1,eval_top5\n"


@pytest.fixture
def two_runs(tmp_path):
    for name, rows in (("first", "0,2.0,10,50\n1,1.5,20,60\n"), ("second", "0,2.1,11,52\n1,1.4,,61\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.csv").write_text(HEADER + rows)
    return tmp_path


@pytest.mark.slow
def test_runs_side_by_side(two_runs, capsys):
    picture = two_runs / "new" / "curves.svg"
    assert main(["plot", str(two_runs / "first"), str(two_runs / "second/summary.csv"), "--output", str(picture)]) == 0
    assert capsys.readouterr().out.strip() == str(picture)
    words = re.findall(r"<text[^>]*>([^<]*)</text>", picture.read_text())
    assert {"first", "second", "top-1", "top-5", "epoch"} <= set(words)
    before = picture.read_bytes()
    main(["plot", str(two_runs / "first"), str(two_runs / "second/summary.csv"), "--output", str(picture)])
    assert picture.read_bytes() == before  # the same picture is the same file


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        ([], 2, "give folders of runs, or --loss"),
        (["first", "--loss", "ce"], 2, "one of the two"),
        (["first", "--landscape"], 2, "belong to --loss"),
        (["--loss", "ce", "--columns", "eval_top1"], 2, "--columns belongs to runs"),
        (["first", "--output", "plot.gif"], 2, "must end in .svg, .png, .pdf, got 'plot.gif'"),
        (["elsewhere"], 1, "elsewhere is not the folder of a training run: it holds no summary.csv"),
        (["empty"], 1, "has no epoch yet"),
        (["first", "--columns", "eval_top3"], 1, "no column 'eval_top3'; it has epoch, train_loss, eval_top1"),
        (["--loss", "topk_nll", "--k", "20"], 1, "k"),
        (["--loss", "smooth_topk_svm", "--opt", "tauu=1"], 1, "tauu"),
    ],
)
def test_mistakes_are_told_in_one_line(two_runs, monkeypatch, capsys, argv, status, message):
    monkeypatch.chdir(two_runs)
    (two_runs / "empty").mkdir()
    (two_runs / "empty" / "summary.csv").write_text(HEADER)
    try:
        found = main(["plot", *argv])
    except SystemExit as stop:
        found = stop.code
    assert found == status
    told = capsys.readouterr().err
    assert message in told
    assert len(told.strip().splitlines()) == 1
    assert not (two_runs / "plot.svg").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [[], ["--landscape"]])
def test_losses_by_wildcards(tmp_path, kind):
    picture = tmp_path / "losses.svg"
    assert main(["plot", "--loss", "topk_hinge*", "ce", "--output", str(picture), *kind]) == 0
    text = picture.read_text()
    assert all(name in text for name in ("topk_hinge", "topk_hinge_convex", "topk_hinge_calibrated", "ce"))


def test_a_picture_says_the_numbers_that_it_is_drawn_with(tmp_path):
    assert numbers_of("smooth_topk_svm", k=3, tau=0.1, gamma=2) == "k=3 tau=0.1 alpha=1"
    assert numbers_of("ce") == ""
    picture = tmp_path / "loss.svg"
    assert main(["plot", "--loss", "topk_hinge", "--k", "4", "--output", str(picture)]) == 0
    assert "k=4" in picture.read_text()
