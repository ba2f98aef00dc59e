"""The conformance kit: checks of a loss, for the tests of a plug-in. A loss that passes works in any trainer.

One test can run all checks:

    check_loss(MyLoss)

Or pytest runs one test per check:

    @parametrize_with_checks([MyLoss, "focal"])
    def test_conformance(check):
        check()

If a loss cannot pass a check for a good reason, pass the name of the check and the reason as
``expected_failed_checks``.
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

# On import, each module adds its checks to CHECKS. Basic checks, such as the checks of a call, are imported first.
for module in ("calls", "options", "targets", "numbers", "state", "transforms"):
    import_module(f"{__name__}.{module}")
FIRST = next(iter(CHECKS))  # if this check fails, all other checks are skipped


@dataclass(frozen=True)
class CheckResult:
    """Result of one check of one loss.

    Args:
        name: name of the check.
        status: ``"passed"``, ``"failed"``, ``"expected"`` (the check failed, as ``expected_failed_checks`` says) or
            ``"skipped"`` (the check does not apply to the loss, or the first check of the kit failed).
        why: the docstring of the check, which says what the check tests.
        message: for a failure, the expected and the actual value. Otherwise the reason for the status, or empty.
        place: for a failure, file and line of the loss or of the exception, as text.
    """

    name: str
    status: Literal["passed", "failed", "expected", "skipped"]
    why: str
    message: str = ""
    place: str = ""


@dataclass(frozen=True)
class LossCheck:
    """One check of one loss. A call runs the check and raises an exception if the loss fails."""

    name: str
    subject: Subject
    expected: str | None = None  # the reason, if the check is expected to fail

    def __call__(self) -> None:
        __tracebackhide__ = True
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        with torch.random.fork_rng(devices):
            CHECKS[self.name](self.subject)

    def run(self) -> CheckResult:
        """Run the check and return the result. If the loss fails the check, no error is raised."""
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
        message = f"expected to fail ({self.expected}), but passes: remove it from the list"
        return self.result("failed", message, self.subject.place())

    def result(self, status: Any, message: str = "", place: str = "") -> CheckResult:
        why = " ".join((inspect.getdoc(CHECKS[self.name]) or "").split())
        return CheckResult(self.name, status, why, message, place)


class LossCheckError(AssertionError):
    """Error of :func:`check_loss`: at least one check failed. The message describes each failed check."""

    def __init__(self, name: str, results: list[CheckResult]) -> None:
        self.failed = [result for result in results if result.status == "failed"]
        lines = [f"{name} fails {len(self.failed)} of {len(results)} checks:"]
        for result in self.failed:
            lines += [f"  {result.name}: {result.message}", f"    ({result.why})"]
            lines += [f"    at {result.place}"] if result.place else []
        super().__init__("\n".join(lines))


def check_loss(loss: Any, **options: Any) -> None:
    """Run all checks of ``iter_checks(loss, **options)``. Raise one :class:`LossCheckError` if any checks fail.

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
    """Return an iterator over all checks of one loss. To run a check, call the check or its method ``run``.

    Args:
        loss: a class or function that builds a loss from keyword arguments, the name of a registered loss, a loss
            object, or a function ``(logits, target) -> Tensor``.
        options: keyword arguments for building the loss. If the loss has parameters such as ``num_classes`` and
            ``class_counts``, the kit also passes these values.
        num_classes: number of classes in the data of the checks.
        expected_failed_checks: dictionary ``{name: reason}`` of the checks that the loss fails. If such a check passes,
            the result is a failure.
    """
    expected = dict(expected_failed_checks or {})
    unknown = sorted(expected.keys() - CHECKS.keys())
    if unknown:
        raise ValueError(f"expected_failed_checks names no check {', '.join(unknown)}; there are {', '.join(CHECKS)}")
    subject = Subject.of(loss, options, num_classes)
    return (LossCheck(name, subject, expected.get(name)) for name in CHECKS)


def run_checks(checks: Iterable[LossCheck]) -> Iterator[CheckResult]:
    """Run the checks one after the other and yield the result of each check.

    If the first check of the kit fails, only checks that are expected to fail still run. All others are skipped.
    """
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
    """Return a pytest decorator for a test with the argument ``check``. The test runs once per loss and check.

    Args:
        losses: a list of losses as in :func:`iter_checks`.
        expected_failed_checks: function that takes a loss and returns a dictionary ``{name: reason}`` of the checks
            that the loss fails. The tests of these checks are marked as ``xfail`` with ``strict=True``.
        options: further keyword arguments of :func:`iter_checks`.
    """
    import pytest

    cases = []
    for loss in losses:
        expected = expected_failed_checks(loss) if expected_failed_checks else None
        for check in iter_checks(loss, expected_failed_checks=expected, **options):
            marks = [] if check.expected is None else [pytest.mark.xfail(reason=check.expected, strict=True)]
            cases.append(pytest.param(check, id=f"{check.subject.name}-{check.name}", marks=marks))
    return pytest.mark.parametrize("check", cases)
