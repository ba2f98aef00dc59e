"""The conformance kit: in the tests of a plug-in, check that any trainer can use the loss of the plug-in.

In one line,

    check_loss(MyLoss)

or with one test per check,

    @parametrize_with_checks([MyLoss, "focal"])
    def test_conformance(check):
        check()

If a loss fails a check for a good reason, list the check with the reason in ``expected_failed_checks``.
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

# each module adds its checks; checks of type, precision and shape come before comparisons of numbers
for module in ("calls", "options", "targets", "numbers", "state", "transforms"):
    import_module(f"{__name__}.{module}")
FIRST = next(iter(CHECKS))  # if it fails, the other checks give no further information


@dataclass(frozen=True)
class CheckResult:
    """Result of one check: status, purpose of the check, expected value and actual value."""

    name: str
    status: Literal["passed", "failed", "expected", "skipped"]
    why: str
    message: str = ""
    place: str = ""  # of a failure: file and line of the loss, or of the exception


@dataclass(frozen=True)
class LossCheck:
    """One check of one loss. A call raises if the loss fails; ``run`` returns a result."""

    name: str
    subject: Subject
    expected: str | None = None

    def __call__(self) -> None:
        __tracebackhide__ = True
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        with torch.random.fork_rng(devices):
            CHECKS[self.name](self.subject)

    def run(self) -> CheckResult:
        """Return the result. Any exception of the loss is a failed check."""
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
        """Return a result of this check. The docstring of the check says why the check matters."""
        why = " ".join((inspect.getdoc(CHECKS[self.name]) or "").split())
        return CheckResult(self.name, status, why, message, place)


class LossCheckError(AssertionError):
    """A loss failed checks. The message has expected value, actual value and purpose of each failed check."""

    def __init__(self, name: str, results: list[CheckResult]) -> None:
        self.failed = [result for result in results if result.status == "failed"]
        lines = [f"{name} fails {len(self.failed)} of {len(results)} checks:"]
        for result in self.failed:
            lines += [f"  {result.name}: {result.message}", f"    ({result.why})"]
            lines += [f"    at {result.place}"] if result.place else []
        super().__init__("\n".join(lines))


def check_loss(loss: Any, **options: Any) -> None:
    """Run every check on a loss. If checks fail, raise one :class:`LossCheckError` that lists all failures.

    Args:
        loss, options: as for :func:`iter_checks`.

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
    """Return every check, bound to the loss.

    Args:
        loss: a factory, a registered name, a loss object, or a function ``(logits, target) -> Tensor``.
        options: keyword options of the factory. The kit adds context such as ``num_classes`` and ``class_counts``.
        num_classes: number of classes in the data of the checks.
        expected_failed_checks: reason per check that the loss fails, by name. Such a check that passes is a failure.
    """
    expected = dict(expected_failed_checks or {})
    unknown = sorted(expected.keys() - CHECKS.keys())
    if unknown:
        raise ValueError(f"expected_failed_checks names no check {', '.join(unknown)}; there are {', '.join(CHECKS)}")
    subject = Subject.of(loss, options, num_classes)
    return (LossCheck(name, subject, expected.get(name)) for name in CHECKS)


def run_checks(checks: Iterable[LossCheck]) -> Iterator[CheckResult]:
    """Yield the result of each check as soon as it is known. If the first check fails, all others are skipped."""
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
    """Return a pytest decorator that runs a test once per loss and check, with an argument ``check`` to call.

    Args:
        losses: a list of losses as in :func:`iter_checks`.
        expected_failed_checks: function from a loss to the expected failures, as strict ``xfail`` marks.
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
