"""The conformance kit: what any loss must do to be trained with, checked from a plug-in's own tests.

In one line,

    check_loss(MyLoss)

or with one test for each check,

    @parametrize_with_checks([MyLoss, "focal"])
    def test_conformance(check):
        check()

A check that a loss fails for a good reason is listed with that reason in ``expected_failed_checks``; it must then fail.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from topk_registry.testing.checks import CHECKS
from topk_registry.testing.expect import CheckFailedError, NotApplicableError
from topk_registry.testing.result import CheckResult, ChecksFailedError, Status, why
from topk_registry.testing.subject import Subject

__all__ = [
    "CHECKS",
    "CheckResult",
    "ChecksFailedError",
    "LossCheck",
    "LossCheckError",
    "check_loss",
    "iter_checks",
    "parametrize_with_checks",
    "run_checks",
]

FIRST = next(iter(CHECKS))


@dataclass(frozen=True)
class LossCheck:
    """One check of one loss; calling it raises where the loss fails, ``run`` reports."""

    name: str
    subject: Subject
    expected: str | None = None

    @property
    def why(self) -> str:
        return why(CHECKS[self.name])

    @property
    def needs(self) -> tuple[str, ...]:
        """The checks without which this one says nothing new."""
        return () if self.name == FIRST else (FIRST, *getattr(CHECKS[self.name], "needs", ()))

    def __call__(self) -> None:
        __tracebackhide__ = True
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        with torch.random.fork_rng(devices):
            CHECKS[self.name](self.subject)

    def run(self) -> CheckResult:
        try:
            self()
        except NotApplicableError as reason:
            return self._result("skipped", str(reason))
        except CheckFailedError as failure:
            message, place = str(failure), self.subject.place()
        except Exception as error:  # whatever a loss raises is a finding, not the kit's own failure
            message, place = f"expected no error, got {type(error).__name__}: {error}", self.subject.place(error)
        else:
            if self.expected is None:
                return self._result("passed")
            message = f"expected to fail ({self.expected}), but passes: no longer list it"
            return self._result("failed", message, self.subject.place())
        if self.expected is not None:
            return self._result("expected", self.expected)
        return self._result("failed", message, place)

    def _result(self, status: Status, message: str = "", place: str = "") -> CheckResult:
        return CheckResult(self.name, status, self.why, message, place)


class LossCheckError(ChecksFailedError):
    """A loss failed checks; the message lists each with what was expected and what came."""


def check_loss(
    loss: Any,
    *,
    options: Mapping[str, Any] | None = None,
    num_classes: int = 16,
    expected_failed_checks: Mapping[str, str] | None = None,
) -> None:
    """Run every check on a loss and raise one :class:`LossCheckError` that lists all failures.

    Args:
        loss: a factory, a registered name, a loss object, or a function ``(logits, target) -> Tensor``.
        options: keyword options to build it with; context (``num_classes``, ``class_counts``, ...) is supplied.
        num_classes: classes in the data of the checks.
        expected_failed_checks: names of checks and why the loss fails them; one that passes is a failure.

    Example:
        >>> check_loss(torch.nn.CrossEntropyLoss)
    """
    checks = iter_checks(loss, options=options, num_classes=num_classes, expected_failed_checks=expected_failed_checks)
    results = list(run_checks(checks))
    if any(result.status == "failed" for result in results):
        raise LossCheckError(Subject.of(loss).name, results)


def iter_checks(
    loss: Any,
    *,
    options: Mapping[str, Any] | None = None,
    num_classes: int = 16,
    expected_failed_checks: Mapping[str, str] | None = None,
) -> Iterator[LossCheck]:
    """Every check, bound to the loss and ready to call; arguments as for :func:`check_loss`."""
    expected = dict(expected_failed_checks or {})
    unknown = sorted(expected.keys() - CHECKS.keys())
    if unknown:
        raise ValueError(f"expected_failed_checks names no check {', '.join(unknown)}; there are {', '.join(CHECKS)}")
    subject = Subject.of(loss, options, num_classes)
    return (LossCheck(name, subject, expected.get(name)) for name in CHECKS)


def run_checks(
    checks: Iterable[LossCheck], *, started: Callable[[LossCheck], object] | None = None
) -> Iterator[CheckResult]:
    """Return the result of each check as it is found, but of those that would only repeat an earlier failure.

    Args:
        checks: from :func:`iter_checks`.
        started: is called with each check before it runs, to show progress.
    """
    failed: set[str] = set()
    for check in checks:
        if started is not None:
            started(check)
        missing = [name for name in check.needs if name in failed] if check.expected is None else []
        left_out = CheckResult(check.name, "skipped", check.why, f"needs {missing[0]}") if missing else None
        result = left_out or check.run()
        if left_out or result.status in ("failed", "expected"):
            failed.add(check.name)
        yield result


def parametrize_with_checks(
    losses: Iterable[Any],
    *,
    options: Callable[[Any], Mapping[str, Any]] | None = None,
    num_classes: int = 16,
    expected_failed_checks: Callable[[Any], Mapping[str, str]] | None = None,
) -> Any:
    """A pytest decorator that gives the test one ``check`` at a time, to be called, for each loss.

    Args:
        losses: what :func:`check_loss` takes, each.
        options: of a loss, the options to build it with.
        num_classes: classes in the data of the checks.
        expected_failed_checks: of a loss, its expected failures; they become strict ``xfail`` marks.
    """
    import pytest

    cases = []
    for loss in losses:
        for check in iter_checks(
            loss,
            options=options(loss) if options else None,
            num_classes=num_classes,
            expected_failed_checks=expected_failed_checks(loss) if expected_failed_checks else None,
        ):
            marks = [] if check.expected is None else [pytest.mark.xfail(reason=check.expected, strict=True)]
            cases.append(pytest.param(_skipping(check), id=f"{check.subject.name}-{check.name}", marks=marks))
    return pytest.mark.parametrize("check", cases)


def _skipping(check: LossCheck) -> Callable[[], None]:
    import pytest

    def call() -> None:
        __tracebackhide__ = True
        try:
            check()
        except NotApplicableError as reason:
            pytest.skip(str(reason))

    return call
