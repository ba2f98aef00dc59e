"""Progress: a line that changes on a terminal, and lines of a log where work takes long."""

import io

import pytest

from topk_registry.cli.progress import INTERVAL, Progress


class Stream(io.StringIO):
    def __init__(self, is_terminal):
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self):
        return self.is_terminal


@pytest.fixture
def clock():
    class Clock:
        now = 100.0

        def __call__(self):
            return self.now

    return Clock()


def test_a_terminal_shows_each_step_in_one_line(clock):
    stream = Stream(True)
    progress = Progress(2, stream, clock)
    progress("first")
    progress.at(1, "first")  # what the line shows already
    progress("second")
    progress.clear()
    assert stream.getvalue() == "\r\x1b[K[1/2] first ...\r\x1b[K[2/2] second ...\r\x1b[K"


def test_a_log_has_a_line_for_every_twenty_seconds(clock):
    stream = Stream(False)
    progress = Progress(4, stream, clock)
    progress("first")
    clock.now += INTERVAL
    progress("second")
    progress("third")
    clock.now += INTERVAL
    progress("fourth")
    progress.clear()
    assert stream.getvalue() == "[2/4] second ...\n[4/4] fourth ...\n"


def test_a_log_of_quick_work_is_empty(clock):
    stream = Stream(False)
    progress = Progress(19, stream, clock)
    for step in range(19):
        clock.now += INTERVAL / 20
        progress(str(step))
    progress.clear()
    assert stream.getvalue() == ""
