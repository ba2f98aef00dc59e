"""What the commands that look at models say when they are interrupted."""

import pytest

from topk_registry.evaluation.flags import command
from topk_registry.train.errors import Interrupted


@pytest.mark.parametrize(
    ("argv", "cause", "told"),
    [
        (["a", "b"], None, "the same command goes on where it stopped"),
        (["a", "b", "--no-cache"], None, "the same command starts anew, as --no-cache keeps no scores"),
        (["a", "--no-cache"], Interrupted(2), "the same command goes on where it stopped"),
    ],
    ids=["kept", "not kept", "folds are kept"],
)
def test_an_interruption_says_what_is_kept(capsys, argv, cause, told):
    @command("compare")
    def main(argv):
        raise KeyboardInterrupt from cause

    assert main(argv) == 130
    assert capsys.readouterr().err == f"topk-registry compare: interrupted; {told}\n"
