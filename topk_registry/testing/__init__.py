"""The conformance kit: what any loss must do to be trained with, checked from a plug-in's own tests.

In one line,

    check_loss(MyLoss)

or with one test for each check,

    @parametrize_with_checks([MyLoss, "focal"])
    def test_conformance(check):
        check()

A check that a loss fails for a good reason is listed with that reason in ``expected_failed_checks``; it must then fail.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import torch

from topk_registry.testing.expect import CHECKS, CheckFailedError, NotApplicableError
from topk_registry.testing.subject import Subject

__all__ = [
    "CHECKS",
    "CheckResult",
    "LossCheck",
    "LossCheckError",
    "check_loss",
    "iter_checks",
    "parametrize_with_checks",
    "run_checks",
]

# each module adds its checks: the first ones are about type, precision and shape, and numbers are compared after them
for module in ("calls", "options", "targets", "numbers", "state", "transforms"):
    import_module(f"{__name__}.{module}")
FIRST = next(iter(CHECKS))  # without it no other check says anything new


@dataclass(frozen=True)
class CheckResult:
    """Result of one check: its status, why the check matters, the expected value and the actual one."""

    name: str
    status: Literal["passed", "failed", "expected", "skipped"]
    why: str
    message: str = ""
    place: str = ""  # of a failure: the file and line of the loss, or of what it raised


@dataclass(frozen=True)
class LossCheck:
    """One check of one loss; calling it raises where the loss fails, ``run`` reports."""

    name: str
    subject: Subject
    expected: str | None = None

    def __call__(self) -> None:
        __tracebackhide__ = True
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        with torch.random.fork_rng(devices):
            CHECKS[self.name](self.subject)

    def run(self) -> CheckResult:
        """Return the result; whatever a loss raises is a finding, not the kit's own failure."""
        try:
            self()
        except NotApplicableError as reason:
            return self.result("skipped", str(reason))
        except Exception as error:
            if self.expected is not None:
                return self.result("expected", self.expected)
            failed = isinstance(error, CheckFailedError)
            message = str(error) if failed else f"expected no error, got {type(error).__name__}: {error}"
            return self.result("failed", message, self.subject.place(None if failed else error))
        if self.expected is None:
            return self.result("passed")
        message = f"expected to fail ({self.expected}), but passes: no longer list it"
        return self.result("failed", message, self.subject.place())

    def result(self, status: Any, message: str = "", place: str = "") -> CheckResult:
        """Return a result of this check; the docstring of the check says why it matters."""
        why = " ".join((inspect.getdoc(CHECKS[self.name]) or "").split())
        return CheckResult(self.name, status, why, message, place)


class LossCheckError(AssertionError):
    """A loss failed checks; the message lists each with what was expected, what came, and why it matters."""

    def __init__(self, name: str, results: list[CheckResult]) -> None:
        self.failed = [result for result in results if result.status == "failed"]
        lines = [f"{name} fails {len(self.failed)} of {len(results)} checks:"]
        for result in self.failed:
            lines += [f"  {result.name}: {result.message}", f"    ({result.why})"]
            lines += [f"    at {result.place}"] if result.place else []
        super().__init__("\n".join(lines))


def check_loss(loss: Any, **options: Any) -> None:
    """Run every check on a loss and raise one :class:`LossCheckError` that lists all failures.

    Args:
        loss, options: those of :func:`iter_checks`.

    Example:
        >>> check_loss(torch.nn.CrossEntropyLoss)
    """
    results = list(run_checks(iter_checks(loss, **options)))
    if any(result.status == "failed" for result in results):
        raise LossCheckError(Subject.of(loss).name, results)


def iter_checks(
    loss: Any,
    *,
    options: Mapping[str, Any] | None = None,
    num_classes: int = 16,
    expected_failed_checks: Mapping[str, str] | None = None,
) -> Iterator[LossCheck]:
    """Return every check, bound to the loss and ready to call.

    Args:
        loss: a factory, a registered name, a loss object, or a function ``(logits, target) -> Tensor``.
        options: keyword options to build it with; context (``num_classes``, ``class_counts``, ...) is supplied.
        num_classes: classes in the data of the checks.
        expected_failed_checks: names of checks and why the loss fails them; one that passes is a failure.
    """
    expected = dict(expected_failed_checks or {})
    unknown = sorted(expected.keys() - CHECKS.keys())
    if unknown:
        raise ValueError(f"expected_failed_checks names no check {', '.join(unknown)}; there are {', '.join(CHECKS)}")
    subject = Subject.of(loss, options, num_classes)
    return (LossCheck(name, subject, expected.get(name)) for name in CHECKS)


def run_checks(checks: Iterable[LossCheck]) -> Iterator[CheckResult]:
    """Yield the result of each check as it is found; if the first one fails, all others are skipped."""
    first_failed = False
    for check in checks:
        if first_failed and check.expected is None:
            yield check.result("skipped", f"needs {FIRST}")
            continue
        result = check.run()
        first_failed |= check.name == FIRST and result.status == "failed"
        yield result


def parametrize_with_checks(
    losses: Iterable[Any],
    *,
    expected_failed_checks: Callable[[Any], Mapping[str, str]] | None = None,
    **options: Any,
) -> Any:
    """Return a pytest decorator that gives the test one ``check`` at a time, to be called, for each loss.

    Args:
        losses: what :func:`iter_checks` takes, each.
        expected_failed_checks: of a loss, its expected failures; they become strict ``xfail`` marks.
        options: further options of :func:`iter_checks`.
    """
    import pytest

    cases = []
    for loss in losses:
        expected = expected_failed_checks(loss) if expected_failed_checks else None
        for check in iter_checks(loss, expected_failed_checks=expected, **options):
            marks = [] if check.expected is None else [pytest.mark.xfail(reason=check.expected, strict=True)]
            cases.append(pytest.param(check, id=f"{check.subject.name}-{check.name}", marks=marks))
    return pytest.mark.parametrize("check", cases)
