"""Compiled kernels are kept, found again and announced, whatever state the folder that keeps them is in."""
# pyright: reportCallIssue=false
# numba's intrinsics are called without their first parameter

import errno
import io
import os
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

numba = pytest.importorskip("numba")

import topk_registry  # noqa: E402
from topk_registry.ops.cpu import compiling, threads  # noqa: E402
from topk_registry.ops.cpu.functions import BODY  # noqa: E402
from topk_registry.ops.cpu.memory import array  # noqa: E402

AS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0
NO_PLACE = "every process compiles its own.* set NUMBA_CACHE_DIR"


class Timer:
    """A timer that a test lets go off; it remembers all that were made."""

    made: list["Timer"]
    daemon = False

    def __init__(self, seconds, function):
        self.seconds, self.function, self.cancelled = seconds, function, False
        self.made.append(self)

    def start(self):
        assert self.daemon

    def cancel(self):
        self.cancelled = True


@pytest.fixture
def clock():
    Timer.made = []
    return [0.0]


def test_two_seconds_of_several_kernels_count_together_and_are_said_once(clock, capsys):
    notice = compiling.Notice(2.0, lambda: clock[0], Timer)
    for passed in (0.5, 0.75, 0.25):
        with notice.over("/kept"):
            clock[0] += passed
    assert [timer.seconds for timer in Timer.made] == [2.0, 1.5, 0.75]
    assert all(timer.cancelled for timer in Timer.made)
    assert capsys.readouterr().err == ""
    with notice.over("/kept"):
        Timer.made[-1].function()
        Timer.made[-1].function()
    with notice.over("/kept"):
        pass
    assert len(Timer.made) == 4
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    for word in ("compiling kernels", "once", "/kept"):
        assert word in said


def test_a_kernel_that_fails_stops_its_timer(clock):
    notice = compiling.Notice(2.0, lambda: clock[0], Timer)
    with pytest.raises(KeyError), notice.over("/kept"):
        raise KeyError
    assert Timer.made[0].cancelled


@pytest.mark.parametrize("closed", [True, False])
def test_without_a_stream_nothing_is_said_and_nothing_breaks(monkeypatch, closed):
    stream = None
    if closed:
        stream = io.StringIO()
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    notice = compiling.Notice()
    notice.say("/kept")
    assert notice.said


def test_threads_that_find_out_together_say_one_line(capsys):
    notice, ready = compiling.Notice(), threading.Barrier(8)

    def say():
        ready.wait()
        notice.say("")

    with ThreadPoolExecutor(8) as pool:
        for found in [pool.submit(say) for _ in range(8)]:
            found.result()
    said = capsys.readouterr().err
    assert said.count("topk-registry:") == 1
    assert "no place to keep them" in said


PROGRAM = """
import sys
import numba, numpy as np, torch
from topk_registry.ops import backend
from topk_registry.ops.cpu import compiling, threads
from topk_registry.ops.cpu.functions import BODY
from topk_registry.ops.cpu.memory import array

compiling._notice.left = float(sys.argv[1])
def double(job):
    _, address = array(job, 2, np.int64)
    array(address, 1, np.int64)[0] *= 2

number = torch.tensor([21])
body = backend.in_clean_thread(lambda: compiling.kernel(BODY.signature, double, "double").ctypes)
threads.run(body, number, threads=1)
assert number.item() == 42
print(compiling.folder(), compiling.problem())
"""


def program(folder, seconds, tmp_path):
    """Compile a small kernel in a process of its own that keeps kernels in a folder; what it printed, twice."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder)}
    ran = subprocess.run(
        [sys.executable, file, str(seconds)], env=environment, capture_output=True, text=True, timeout=100
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip(), ran.stderr


def test_a_process_says_that_it_compiles_and_a_second_one_says_nothing(tmp_path):
    folder = tmp_path / "kernels"
    told, said = program(folder, 0.0, tmp_path)
    assert said.count("\n") == 1
    assert f"compiling kernels for this processor, which is done once; they are kept in {folder}" in said
    assert told == str(folder)
    assert program(folder, 0.0, tmp_path) == (str(folder), "")  # loads


def test_a_quick_compilation_says_nothing(tmp_path):
    assert program(tmp_path / "kernels", 60.0, tmp_path) == (str(tmp_path / "kernels"), "")


def adding(step):
    """A kernel that adds a step to a number."""

    def body(job):
        _, address = array(job, 2, np.int64)
        array(address, 1, np.int64)[0] += step

    return body


def compiled(step):
    """The kernel, tried; and whether it was loaded."""
    found = compiling.kernel(BODY.signature, adding(step), f"adding {step}")
    number = torch.tensor([1])
    threads.run(found.ctypes, number, threads=1)
    assert number.item() == 1 + step
    return found.cache_hits == 1


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder for kernels."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(compiling, "_kept", compiling._Kept())
    return tmp_path / "kernels"


def files(folder, ending):
    return sorted(folder.rglob(f"*{ending}"))


def test_a_kernel_is_kept_once(folder):
    assert [compiled(3), compiled(3), compiled(4), compiled(4)] == [False, True, False, True]
    assert compiling.folder() == str(folder)
    assert compiling.problem() == ""


@numba.njit
def twice(x):
    return 2 * x


@numba.njit(cache=True)
def thrice(x):
    return 3 * x


def one_number(function):
    """A body that puts a function's value in place of a number."""

    def body(job):
        _, address = array(job, 2, np.int64)
        number = array(address, 1, np.int64)
        number[0] = function(number[0])

    return body


@pytest.mark.parametrize("function", [twice, thrice])
def test_a_function_that_a_kernel_calls_stays_callable(folder, function):
    """A plug-in's curve may call a function that Python calls too, before or after: whether numba keeps it or not."""
    expected, name = function.py_func(7), function.py_func.__name__
    assert function(1.5) == function.py_func(1.5)
    for i in range(3):
        number = torch.tensor([7])
        threads.run(compiling.kernel(BODY.signature, one_number(function), f"{name}{i}").ctypes, number, threads=1)
        assert number.item() == expected
        assert numba.njit(lambda x: function(x) + 1)(np.int8(7)) == expected + 1
        if i == 1:  # the third kernel finds it compiled by Python
            assert function(7) == expected
    assert function(1.5) == function.py_func(1.5)
    assert {str(kinds[0]) for kinds in function.overloads} == {"float64", "int8", "int64"}


def test_a_function_of_the_operators_is_compiled_for_kernels_alone(folder):
    """It has no machine code of its own, and other compiled functions may call it."""
    from topk_registry.ops.cpu.numbers import largest_integer

    @numba.njit
    def largest(number):
        return largest_integer(np.array([number, 3]))

    number = torch.tensor([21])
    threads.run(compiling.kernel(BODY.signature, one_number(largest), "largest").ctypes, number, threads=1)
    assert number.item() == 21
    (of_kernel,) = largest_integer.overloads.values()
    assert not of_kernel.library.is_machine_code
    with pytest.raises(TypeError, match="bad argument type"):
        largest_integer(np.array([21]))
    assert largest(2) == 3


FORKED = """
import os, signal, threading
import torch, topk_registry
from numba.core import event

torch.set_num_threads(1)
begun, loss = threading.Event(), topk_registry.create_loss("sigmoid_mse")
logits, target = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([1])

class Begun(event.Listener):
    def on_start(self, event):
        begun.set()

    def on_end(self, event):
        pass

event.register("numba:compile", Begun())
values = []
threads = threading.Thread(target=lambda: values.append(loss(logits, target).item()))
threads.start()
assert begun.wait(60)
child = os.fork()
if not child:
    signal.alarm(100)  # ends a child that waits for ever
    os._exit(10 if abs(loss(logits, target).item() - {value}) < 1e-6 else 11)
_, status = os.waitpid(child, 0)
threads.join()
assert os.waitstatus_to_exitcode(status) == 10, status
assert abs(values[0] - {value}) < 1e-6, values
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.usefixtures("without_library")
def test_a_process_that_is_forked_while_a_thread_compiles_has_its_kernels(tmp_path):
    """A worker of a loader, forked at the first batch: the compiler's lock is free there, and its kernels are right."""
    with topk_registry.use_backend("torch"):
        loss = topk_registry.create_loss("sigmoid_mse")
        value = loss(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([1])).item()
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "TOPK_REGISTRY_BACKEND": "auto"}
    command = [sys.executable, "-W", "ignore", "-c", FORKED.format(value=value)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


DAMAGES = [lambda b: b"", lambda b: b[: len(b) // 2], lambda b: bytes(len(b)), lambda b: b"no"]


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_compiled_anew_and_replaced(folder, ending, damage):
    compiled(3)
    (file,) = files(folder, ending)
    file.write_bytes(damage(file.read_bytes()))
    assert [compiled(3), compiled(3)] == [False, True]


def test_one_wrong_bit_in_the_machine_code_is_noticed(folder):
    compiled(3)
    (file,) = files(folder, "nbc")
    content = bytearray(file.read_bytes())
    content[content.index(b"ELF") + 200] ^= 1
    file.write_bytes(content)
    assert [compiled(3), compiled(3)] == [False, True]


def test_a_kernel_under_the_name_of_another_is_not_taken_for_it(folder):
    """Two processes that write at once may both take the first free name; the index then names one of them."""
    compiled(3)
    (file,) = files(folder, "nbc")
    three = file.read_bytes()
    file.unlink()
    files(folder, "nbi")[0].unlink()
    compiled(4)
    file.write_bytes(three)
    assert [compiled(4), compiled(4)] == [False, True]


@pytest.mark.parametrize("place", ["_save_index", "_save_data"])
def test_on_a_full_disk_a_warning_says_so_and_the_kernel_serves(folder, monkeypatch, place):
    def full(self, *args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(f"numba.core.caching.IndexDataCacheFile.{place}", full)
    with pytest.warns(UserWarning, match=f"No space left.*{NO_PLACE}"):
        assert not compiled(3)
    assert "No space left" in compiling.problem()
    monkeypatch.undo()


def read_only(folder, monkeypatch):
    """Let nothing be written there, for root too."""
    if not AS_ROOT:
        for path in (folder, *folder.rglob("*")):
            path.chmod(path.stat().st_mode & ~0o222)
        return

    def refuse(self):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("numba.core.caching._CacheLocator.ensure_cache_path", refuse)


def test_a_folder_that_cannot_be_written_is_read(folder, monkeypatch):
    """As in a container whose image was made with its kernels."""
    compiled(3)
    read_only(folder, monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiled(3)
    assert compiling.folder() == str(folder)


def test_what_is_missing_there_is_compiled(folder, monkeypatch):
    compiled(3)
    before = {path: path.read_bytes() for path in files(folder, "nb*")}
    read_only(folder, monkeypatch)
    if AS_ROOT:
        with pytest.warns(UserWarning, match=NO_PLACE):
            assert not compiled(4)
    else:  # kept elsewhere
        compiled(4)
    assert {path: path.read_bytes() for path in files(folder, "nb*")} == before


@pytest.mark.skipif(sys.platform == "win32", reason="a second process takes long to start")
def test_two_processes_that_compile_at_once_are_both_right(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(program, tmp_path / "kernels", 60.0, tmp_path) for _ in range(2)]
        assert [one.result() for one in both] == [(str(tmp_path / "kernels"), "")] * 2
    assert program(tmp_path / "kernels", 0.0, tmp_path)[1] == ""
