"""What the pages tell a reader to type runs, or where it cannot run here, is understood by the command's own parser.

A fenced block of shell or Python has one of these markers on the line before it:

- ``<!-- run -->``: run here, in the order of the page, in one folder for the page.
- ``<!-- run: WHAT -->``: run by the test of that name in this file.
- ``<!-- ci: NAME -->``: run by ``.ci/run``.
- ``<!-- NAME -->``: a test names it.
- ``<!-- parsed: WHY -->`` or none, shell only: every command of ours goes through its own parser.
"""

import argparse
import importlib
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch

from topk_export import check_column
from topk_registry import ClassificationLoss
from topk_registry.cli.main import main
from topk_registry.testing import check_dataset, check_score, iter_checks, run_checks

ROOT = Path(__file__).parents[1]
PROGRAMS = ROOT / "docs" / "programs"
SCRIPTS = ROOT / "tests" / "train" / "scripts"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "docs" / "guide").glob("*.md")) + sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(r"(?:<!-- ([^\n]*?) -->\n)?^```(sh|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
OURS = ("topk-registry", "timm", "topk-train")


@dataclass
class Block:
    page: Path
    marker: str
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [Block(page, match[1] or "", match[2], match[3]) for match in found]


def label(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands(text: str) -> list[list[str]]:
    """Commands of ours in shell text, as words; lines that go on are joined, comments and environment left out."""
    lines = text.replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    words = [command[command.index("-m") + 1 :] if command[:1] == ["torchrun"] else command for command in words]
    words = [["timm", *command[1:]] if command[:1] == ["topk_registry"] else command for command in words]
    return [command for command in words if command and command[0] in OURS]


class Parsed(Exception):  # noqa: N818
    """A command line was understood."""


def understood(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the command to its parser and stop there."""
    plain = argparse.ArgumentParser.parse_known_args

    words = [word for word in command[1:] if word != "..."]
    foreign = any(word in words for word in ("--train-script", "--script"))  # a script has flags of its own

    def parse(self, *args, **kwargs):
        found, unknown = plain(self, *args, **kwargs)
        if self.prog.startswith(OURS) and (foreign or not unknown):
            raise Parsed
        return found, unknown

    if command[0] == "topk-train":
        words = ["train", *words]
    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", parse)
        try:
            status = main(words)
        except Parsed:
            status = 0
        except SystemExit as stop:
            status = stop.code
    assert not status, " ".join(command)


def known_markers() -> str:
    tests = [path for path in (ROOT / "tests").rglob("test_*.py") if path.name != Path(__file__).name]
    return "\n".join(path.read_text(encoding="utf-8") for path in tests)


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_every_block_is_run_by_somebody_or_parsed(page):
    tests, here = known_markers(), Path(__file__).read_text(encoding="utf-8")
    for block in blocks(page):
        kind, _, what = block.marker.partition(": ")
        first = block.text.splitlines()[0]
        if kind == "run":
            assert not what or f'"{what}"' in here, f"{page}: no test runs {what!r}"
        elif kind == "ci":
            assert f"block {what})" in (ROOT / ".ci/run").read_text()
        elif kind == "parsed" or block.language == "sh":
            assert block.language == "sh", f"{page}: {first!r} can be run"
        else:
            name = block.marker if block.marker in tests else f"{kind}: {{name}}"
            assert block.marker, f"{page}: nothing runs the block that begins {first!r}: mark it <!-- run -->"
            assert name in tests, f"{page}: no test names {block.marker!r}"


@pytest.mark.parametrize("page", [page for page in PAGES if any(b.language == "sh" for b in blocks(page))], ids=label)
def test_commands_are_understood(page, monkeypatch, capsys):
    for block in blocks(page):
        if block.language == "sh":
            for command in commands(block.text):
                understood(command, monkeypatch)
                capsys.readouterr()


def test_images_are_sent_as_the_service_takes_them():
    sent = []
    for page in PAGES:
        for line in "\n".join(block.text for block in blocks(page) if block.language == "sh").splitlines():
            if line.startswith("curl ") and "/predict" in line:
                sent.append((label(page), line))
    assert sent
    for page, line in sent:  # tests/export/serve sends each of these; curl's own default is refused
        taken = re.search(r"image=@|Content-Type: (image/|application/json)", line)
        assert taken, f"{page}: the service refuses {line}"


@pytest.mark.parametrize("command", ["timm train --no-such-flag", "topk-registry plot --colour red"])
def test_a_flag_that_is_not_there_is_found_out(command, monkeypatch):
    with pytest.raises(AssertionError):
        understood(shlex.split(command), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if any(b.marker == "run" for b in blocks(page))], ids=label)
def test_blocks_run_in_the_order_of_the_page(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {}
    for block in blocks(page):
        if block.marker == "run":
            if block.language == "python":
                exec(block.text, scope)
            else:
                run(block.text)


def run(text: str) -> None:
    """Run commands of ours and programs of docs/ in this process, so that torch is imported once."""
    for line in text.replace("\\\n", " ").splitlines():
        program, *words = shlex.split(line, comments=True)
        if program == "python":
            program_of_the_docs(*words)
        elif program == "ls":
            subprocess.run(line, shell=True, check=True)
        else:
            assert program in OURS, line
            assert main(words) == 0, line


def program_of_the_docs(name: str, *words: str) -> None:
    before = sys.argv
    sys.argv = [name, *words]
    try:
        runpy.run_path(str(PROGRAMS / Path(name).name), run_name="__main__")
    finally:
        sys.argv = before


def text(page: str, what: str) -> str:
    (found,) = [block.text for block in blocks(ROOT / page) if block.marker == f"run: {what}"]
    return found


@pytest.mark.slow
def test_a_loss_that_tells_of_itself_conforms(tmp_path, monkeypatch):
    (tmp_path / "tempered_loss.py").write_text(text("docs/guide/plugins.md", "what a loss tells"))
    monkeypatch.syspath_prepend(str(tmp_path))
    loss = importlib.import_module("tempered_loss").Tempered
    checks = {result.name: result.status for result in run_checks(iter_checks(loss))}
    assert set(checks.values()) <= {"passed", "skipped"}
    assert checks["option_ranges_are_kept"] == checks["tuning_grid_can_be_tried"] == "passed"


@pytest.fixture
def defined(tmp_path, monkeypatch):
    """``defined(what)``: a module with the block of the page on plug-ins that is called so."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def module(what):
        name = f"page_{what.replace(' ', '_')}"
        (tmp_path / f"{name}.py").write_text(text("docs/guide/plugins.md", what))
        monkeypatch.setitem(sys.modules, name, importlib.import_module(name))
        return sys.modules[name]

    return module


@pytest.mark.slow
def test_the_pages_own_kernel_conforms_and_is_used(defined, monkeypatch):
    page = defined("a kernel of its own")
    assert [result for result in run_checks(iter_checks(page.FastBrier)) if result.status == "failed"] == []
    rows = mock.Mock(side_effect=page.brier_rows)
    monkeypatch.setattr(page, "brier_rows", rows)
    page.FastBrier()(torch.randn(4, 6), torch.tensor([0, 3, 5, 1]))
    assert rows.call_count == 1


def test_the_pages_loss_of_a_batch_conforms(defined):
    loss = defined("a loss of a batch").WorstRows
    assert [result for result in run_checks(iter_checks(loss)) if result.status == "failed"] == []


def test_the_pages_data_set_score_and_column_pass_their_checks(defined):
    check_dataset(defined("a data set").Greys)
    check_score(defined("a score").Gap)
    check_column(defined("a column").Doubt)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("program") / "images"
    program_of_the_docs("make_folder.py", str(folder))
    return folder


START = ["make a folder", "train on the folder", "train with another loss", "plot", "export"]
unclosed_files = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
few_cores = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


@pytest.mark.slow
@unclosed_files
@few_cores
def test_a_newcomer_gets_from_a_folder_of_images_to_a_file_that_predicts(tmp_path, monkeypatch, capsys):
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    for what in START:
        run(text("docs/guide/start.md", what))
    assert (tmp_path / "curves.svg").stat().st_size > 1000
    rows = capsys.readouterr().out.strip().splitlines()[-400:]
    assert all("images/val/field-" in row for row in rows[1:])
    image = str(next(tmp_path.glob("images/val/*/*.png")))
    example = text("docs/guide/serve.md", "predictor").replace("resnet50.onnx", "flowers.onnx")
    exec(example.replace("cat.jpg", image).replace("dog.jpg", image), {})
    assert capsys.readouterr().out.count("field") >= 2


@pytest.fixture
def told(monkeypatch):
    """The epochs that losses are told of."""
    epochs = []
    monkeypatch.setattr(ClassificationLoss, "set_epoch", lambda self, epoch: epochs.append(epoch))
    return epochs


@pytest.mark.slow
@pytest.mark.parametrize("name", ["own_loop", "lightning_loop", "accelerate_loop"])
@pytest.mark.filterwarnings("ignore")  # of Lightning and Accelerate about torch
def test_programs_learn(name, capfd, told):
    library = name.removesuffix("_loop")
    if library != "own" and find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    program_of_the_docs(f"{name}.py")
    accuracy = [float(found) for found in re.findall(r"top-5 (\d\.\d+)", capfd.readouterr().out)]
    assert len(accuracy) == 3
    if library == "own":  # a program ends at its best, or its reader trains for nothing
        assert accuracy[-1] == max(accuracy)
    assert max(accuracy) > 0.4  # by chance 5 of 20
    assert told == [0, 1, 2]


@pytest.mark.slow
def test_the_torchvision_loop_learns(images, capsys, told):
    program_of_the_docs("torchvision_loop.py", str(images))
    assert told == [0, 1, 2]
    assert len(re.findall(r"top-3 \d\.\d+", capsys.readouterr().out)) == 3


@pytest.mark.slow
@unclosed_files
@pytest.mark.parametrize(
    ("what", "script", "path"),
    [
        ("timm's script", "timm_current.py", "train.py"),
        ("torchvision's script", "torchvision_reference.py", "references/classification/train.py"),
    ],
)
def test_other_peoples_scripts(what, script, path, images, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").symlink_to(images)
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    source = (SCRIPTS / script).read_text()  # the seams of the real one, which is not ours to ship
    source = source.replace('"--args-file"', '"--args-file", default="args.yaml"').replace("24 * 24", "32 * 32")
    (tmp_path / path).write_text(source)
    shutil.copy(SCRIPTS / "neighbour.py", (tmp_path / path).parent)  # torchvision's script imports from its folder
    run(text("docs/guide/train_with.md", what))
    assert "epoch" in capsys.readouterr().out or what.startswith("torchvision")
