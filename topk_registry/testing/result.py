"""The result of a check, of whatever kit, and the error that lists those that failed."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from topk_registry.testing.expect import CheckFailedError, NotApplicableError

Status = Literal["passed", "failed", "expected", "skipped"]
S = TypeVar("S")


@dataclass(frozen=True)
class CheckResult:
    """Result of one check: its status, why the check matters, the expected value and the actual one."""

    name: str
    status: Status
    why: str
    message: str = ""
    place: str = ""  # of a failure: the file and line of the loss, or of what it raised


class ChecksFailedError(AssertionError):
    """Checks failed; the message lists each with what was expected, what came, and why it matters."""

    def __init__(self, name: str, results: Sequence[CheckResult]) -> None:
        self.failed = [result for result in results if result.status == "failed"]
        lines = [f"{name} fails {len(self.failed)} of {len(results)} checks:"]
        for result in self.failed:
            lines += [f"  {result.name}: {result.message}", f"    ({result.why})"]
            lines += [f"    at {result.place}"] if result.place else []
        super().__init__("\n".join(lines))


def result_of(check: Callable[[S], None], subject: S) -> CheckResult:
    """Run a check of a subject; whatever the subject raises is a finding, not the kit's own failure."""
    try:
        check(subject)
    except NotApplicableError as reason:
        return left_out(check, str(reason))
    except CheckFailedError as failure:
        return CheckResult(check.__name__, "failed", why(check), str(failure))
    except Exception as error:
        return CheckResult(
            check.__name__, "failed", why(check), f"expected no error, got {type(error).__name__}: {error}"
        )
    return CheckResult(check.__name__, "passed", why(check))


def left_out(check: Callable[[S], None], reason: str) -> CheckResult:
    """Return the result of a check that was not made."""
    return CheckResult(check.__name__, "skipped", why(check), reason)


def why(check: Callable[[S], None]) -> str:
    """Return the docstring of a check in one line."""
    return " ".join((inspect.getdoc(check) or "").split())
