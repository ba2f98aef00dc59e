"""Results that compiled graphs keep: marked as torch marks them, and without its compiler."""

import subprocess
import sys

import torch

from topk_registry.ops.constant import constant_result


def test_the_mark_is_torchs_own():
    def ours():
        return 1

    def theirs():
        return 1

    assert vars(constant_result(ours)) == vars(torch.compiler.assume_constant_result(theirs)) != {}


def test_a_first_call_does_not_import_the_compiler():
    """It takes two seconds."""
    program = (
        "import sys, torch, topk_registry as tr\n"
        "tr.create_loss('focal')(torch.randn(4, 10, requires_grad=True), torch.arange(4)).backward()\n"
        "print([name for name in ('torch._dynamo', 'timm', 'sympy') if name in sys.modules])"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split("\n")[-2] == "[]", done.stdout
