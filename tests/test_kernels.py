"""The library of compiled kernels: complete, used where it should be, built anew where sources change, and refused."""

import inspect
import os
import subprocess
import sys
import venv
from importlib import import_module
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch

import topk_plugins
from tests.conftest import forget_kernels
from tests.installing import OFFLINE, PIP, ROOT, run
from topk_registry import create_loss
from topk_registry.cli.main import main
from topk_registry.ops.backend import NotCompiledError, use_backend, without_compiling
from topk_registry.ops.cpu import entries, library
from topk_registry.ops.rows import curve
from topk_registry.ops.softmax.api import softmax_rows


@pytest.fixture(scope="module")
def of_losses():
    """The curves of our losses by module and name, in a process where no other test has changed what is registered."""
    program = (
        "from topk_registry.cli.kernels import curves\n"
        "for one in sorted({(c.curve.__module__, c.curve.__qualname__) for c in curves()}):\n"
        "    print(*one)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    return {tuple(line.split()) for line in done.stdout.splitlines()}


@pytest.mark.slow
def test_the_curve_of_every_loss_is_in_the_library(of_losses):
    """A curve is a function of (log p, log(1 - p), p, 1 - p, own, numbers)."""
    modules = [import_module(f"topk_plugins.{file.stem}") for file in Path(topk_plugins.__file__).parent.glob("*.py")]
    modules += [import_module(f"topk_registry.ops.{name}") for name in ("softmax.ldr",)]
    written = {
        (one.__module__, one.__qualname__)
        for module in modules
        for one in vars(module).values()
        if inspect.isfunction(one) and [*inspect.signature(one).parameters][:4] == ["log_p", "log_not", "p", "not_p"]
    }
    assert len(written) > 10
    assert of_losses == written


def test_files_that_are_not_compiled_import_no_compiler():
    """Else a library would not notice that its sources have changed."""
    for name in library.NOT_COMPILED:
        text = (library.OPERATORS / name).read_text()
        assert ("numba import" in text) == (name in ("cpu/compiling.py", "cpu/linking.py")), name
    left_out = {name.removesuffix(".py").replace("/", ".") for name in library.NOT_COMPILED} - {"cpu.entries"}
    for file in library.sources():
        for name in left_out - {"cpu.compiling", "cpu.threads"}:
            assert f"topk_registry.ops.{name} import" not in file.read_text(), f"{file} imports {name}"


def empty(path, edition, suits=1):
    """Build a library without kernels."""
    code = f"""
        unsigned long long topk_edition = {edition}ull;
        const char *topk_levels = "a b";
        int topk_suits(int level) {{ return {suits}; }}
    """
    path.with_suffix(".c").write_text(code)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, path.with_suffix(".c")], check=True)


def test_another_edition_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "kernels.so"
    empty(path, edition=library.edition() + 1)
    assert "other sources" in library.opened(path).why
    made_from = library.edition() + 1
    monkeypatch.setattr(library, "edition", lambda: made_from)
    assert library.opened(path).why == ""
    assert library.opened(path).get("rows_batch_rows_float32") is None


def test_a_library_for_other_processors_or_none_at_all_is_refused(tmp_path):
    path = tmp_path / "kernels.so"
    empty(path, edition=library.edition(), suits=0)
    assert "for other processors (a, b)" in library.opened(path).why
    (tmp_path / "other.so").write_bytes(b"no library")
    assert "cannot be loaded" in library.opened(tmp_path / "other.so").why


@pytest.mark.usefixtures("without_library")
def test_a_library_that_is_not_there_is_an_error(monkeypatch, tmp_path, capsys):
    assert main(["kernels"]) == 0
    assert "library: none (TOPK_REGISTRY_KERNELS=compile)" in capsys.readouterr().out
    monkeypatch.setenv(library.VARIABLE, str(tmp_path / "none.so"))
    forget_kernels()
    with pytest.raises(FileNotFoundError, match="must be 'compile' or the path of a library"):
        library.library()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["build"], "build needs --output FILE"),
        (["--levels", "generic"], "--output, --levels and --folder are options of build"),
        (["make"], "invalid choice"),
    ],
)
def test_a_wrong_command_line_is_told_of(given, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["kernels", *given])
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("without_library")
def test_where_compiling_is_forbidden_a_missing_kernel_is_told_of(monkeypatch, tmp_path):
    numba = pytest.importorskip("numba")
    from topk_registry.ops.squares.numba.kernel import row

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    row.address.cache_clear()  # another test may have had it compiled
    with without_compiling(), pytest.raises(NotCompiledError):
        entries.address("squares.numba.kernel:row", torch.float32)


def _odd_curve(log_p, log_not, p, not_p, own, numbers):
    return -2.0 * log_p, -2.0 * not_p


@pytest.mark.usefixtures("without_library")
def test_without_numba_and_library_a_curve_is_computed_by_torch(monkeypatch):
    monkeypatch.setattr(curve, "find_spec", lambda name: None)
    curve.is_compilable.cache_clear()
    rows = softmax_rows(curve.Curve(lambda log_p, log_not, own: -2 * log_p, _odd_curve))
    with pytest.warns(UserWarning, match=r"_odd_curve is compiled by numba, which is not installed: torch operations"):
        kernel = rows.kernel()
    assert kernel is None
    curve.is_compilable.cache_clear()


FEW = ("squares_kernel_row_float32", "rows_batch_rows_float32", "rows_batch_total_float32")


@pytest.mark.slow
def test_a_library_is_built_goes_on_where_it_stopped_and_is_the_same_bytes(tmp_path):
    building = pytest.importorskip("topk_registry.ops.rows.building", exc_type=ImportError)

    def built(name, parts):
        path = building.build(tmp_path / name, [], building.levels_here()[-1:], folder=tmp_path / parts, only=FEW)
        return path.read_bytes()

    first = built("first.so", "parts")
    (gone,) = tmp_path.glob("parts/*/*squares*float32.o")
    kept = {file: file.stat().st_mtime_ns for file in tmp_path.glob("parts/*/*.o")}
    assert len(kept) == len(FEW)
    gone.unlink()
    assert built("second.so", "parts") == first
    assert {file for file, time in kept.items() if file.stat().st_mtime_ns != time} == {gone}
    assert built("third.so", "others") == first
    assert library.opened(tmp_path / "first.so").why == ""

    code = (
        "import sys, torch, topk_registry as tr\n"
        "torch.manual_seed(0)\n"
        "loss, x = tr.create_loss('log_spherical_softmax'), torch.randn(4, 10, requires_grad=True)\n"
        "loss(x, torch.arange(4)).backward()\n"
        "print(float(x.grad.abs().sum()), 'numba.core.ccallback' in sys.modules)"
    )
    found = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **given}, capture_output=True, text=True, check=True
        ).stdout.split()[-2:]
        for given in ({"TOPK_REGISTRY_KERNELS": str(tmp_path / "first.so")}, {"TOPK_REGISTRY_BACKEND": "torch"})
    ]
    assert float(found[0][0]) == pytest.approx(float(found[1][0]), rel=1e-5)


@pytest.mark.skipif(bool(library.library().why), reason="there is no library of all kernels")
def test_no_kernel_is_missing():
    """Every loss runs, at every kind of target and in both precisions, where nothing can be compiled."""
    from topk_registry import registry
    from topk_registry.testing.subject import Subject, value_and_gradient

    names = [info.name for info in registry.losses.infos() if info.distribution == "topk-registry"]
    assert len(names) > 20
    with without_compiling():
        for name in names:
            subject = Subject.of(name)
            loss = subject.build()
            for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
                for _, target in subject.targets(loss):
                    value_and_gradient(loss, subject.logits(dtype=dtype), target)


def test_a_run_without_kernels_keeps_to_torch_operations(tmp_path):
    """The state of the run says so, and a resumed one goes on with them."""
    pytest.importorskip("numba")
    environment = {
        **os.environ, "TOPK_REGISTRY_KERNELS": "compile", "NUMBA_CACHE_DIR": str(tmp_path / "kernels"),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    given = (
        *("train", "--loss", "smooth_topk_svm", "--dataset", "topk/hierarchy", "--dataset-opt", "size=48"),
        *("superclasses=4", "fine=3", "--model", "topk_convnet", "--model-kwargs", "width=2", "-b", "16", "-j", "0"),
        *("--no-aug", "--device", "cpu", "--epochs", "1", "--output", str(tmp_path / "out"), "--experiment", "run"),
    )
    done = subprocess.run(
        [sys.executable, "-m", "topk_registry", *given], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "compiled kernels are not there yet" in " ".join(done.stdout.split())
    saved = torch.load(tmp_path / "out/run/last.pth.tar", weights_only=False)
    states = [value for value in saved.values() if isinstance(value, dict) and "backend" in value]
    assert [state["backend"] for state in states] == ["torch"]


def test_use_backend_is_of_the_library_too():
    loss, x = create_loss("smooth_topk_svm"), torch.randn(4, 12)
    with use_backend("torch"):
        wanted = loss(x, torch.arange(4))
    torch.testing.assert_close(loss(x, torch.arange(4)), wanted)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="links of folders")
def test_a_wheel_with_kernels_needs_no_numba(tmp_path):
    """It is installed where there is none, and the losses' tests pass against it."""
    if not library.library().path:
        pytest.skip("there is no library of all kernels")
    build = [sys.executable, ROOT / ".ci/wheel.py", "--output", tmp_path, "--library", library.library().path]
    done = subprocess.run(build, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert "-any" not in wheel.name
    assert wheel.stat().st_size < 8e6
    metadata = next(name for name in ZipFile(wheel).namelist() if name.endswith("METADATA"))
    required = [
        line for line in ZipFile(wheel).read(metadata).decode().splitlines() if line.startswith("Requires-Dist")
    ]
    assert [line for line in required if "numba" in line] == ["Requires-Dist: numba>=0.61; extra == 'fast'"]

    packages, environment = tmp_path / "packages", tmp_path / "environment"
    packages.mkdir()
    for folder in (Path(one) for one in sys.path if Path(one).name in ("site-packages", "dist-packages")):
        for one in folder.iterdir():
            hidden = one.name.startswith(("numba", "llvmlite", "topk", "_editable", "__editable"))
            if not hidden and one.suffix != ".pth" and not (packages / one.name).exists():
                (packages / one.name).symlink_to(one)
    venv.create(environment, with_pip=False)
    (site,) = environment.glob("**/site-packages")
    (site / "borrowed.pth").write_text(f"{packages}\n")
    python = environment / "bin" / "python"
    run(*PIP, "--python", python, "install", *OFFLINE, wheel)
    given = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", library.VARIABLE)}
    tried = subprocess.run(
        [sys.executable, ROOT / ".ci/try_wheel.py", python], env=given, capture_output=True, text=True, timeout=500
    )
    assert tried.returncode == 0, tried.stdout + tried.stderr


@pytest.mark.usefixtures("without_library")
def test_a_library_that_was_asked_for_and_does_not_serve_is_told_of(monkeypatch, tmp_path):
    (tmp_path / "other.so").write_bytes(b"no library")
    monkeypatch.setenv(library.VARIABLE, str(tmp_path / "other.so"))
    forget_kernels()
    with pytest.warns(UserWarning, match=r"TOPK_REGISTRY_KERNELS: .*other\.so cannot be loaded"):
        assert library.library().why
