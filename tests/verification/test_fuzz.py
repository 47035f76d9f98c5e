"""Everything that titanlite reads, attacked with damaged inputs: each is accepted, or rejected in one line.

    FUZZ_SECONDS=300 pytest -m nightly tests/verification/test_fuzz.py
    FUZZ_SECONDS=60 pytest -m nightly tests/verification/test_fuzz.py -k config_file

The seconds are those of the CPU per reader and its child processes, 20 by default.

targets.py has the readers, and what must be true of an accepted input; mutations.py damages valid inputs. An example
may take 10 s of the CPU and 2 GiB, print no control character, and raise only ConfigError or TrainingError. Inputs that
once failed are in found.py and run always.
"""

import contextlib
import io
import itertools
import os
import resource
import signal
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from titanlite.config.errors import TrainingError
from titanlite.config.loader import ConfigError, print_problems
from verification.fuzz.found import FOUND
from verification.fuzz.targets import TARGETS, Check

SECONDS = float(os.environ.get("FUZZ_SECONDS", "20"))
CPU_SECONDS, BYTES = 10, 2 * 2**30
CONTROLS = ("Cc", "Zl", "Zp")
"""Categories of Unicode of line feeds and other characters that do not belong in a line."""


class LimitExceeded(BaseException):
    """An example takes too long; no `except Exception` of the package may catch it."""


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Limit the CPU time and the memory of the body; pytest-timeout limits the wall-clock time of a test."""

    def stop(*_: Any) -> None:
        raise LimitExceeded(f"more than {CPU_SECONDS} s of the CPU")

    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def cpu_seconds() -> float:
    """Return the seconds of the CPU that this process and the processes that it has waited for have taken."""
    return sum(os.times()[:4])


def outcome(check: Check, data: Any) -> str:
    """Return "accepted" or "rejected"; whatever else a reader does is raised."""
    output, errors, problems = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO(), None
    with limits(), contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            check(data)
        except ConfigError as error:
            problems = error.problems
            print_problems(error)
        except TrainingError as error:
            problems = [str(error)]
            print(f"error: {error}", file=sys.stderr)
    assert problems is None or (problems and all(problems)), "a rejection without a reason"
    output.seek(0)
    for line in [*(problems or []), *output.read().split("\n"), *errors.getvalue().split("\n")]:
        assert not [char for char in line if unicodedata.category(char) in CONTROLS], f"control characters in {line!r}"
    return "accepted" if problems is None else "rejected"


@pytest.mark.nightly
@pytest.mark.timeout(SECONDS + 400)  # hypothesis takes up to five minutes to make a failing input small
@pytest.mark.parametrize("name", TARGETS)
def test_every_input_is_accepted_or_rejected_in_one_line(name, tmp_path):
    strategy, check = TARGETS[name](tmp_path)
    outcomes, failed, end = Counter[str](), list[Any](), cpu_seconds() + SECONDS

    @settings(max_examples=500, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def run(data: Any) -> None:
        if failed or cpu_seconds() < end:  # after a failure the same input must fail again
            try:
                outcomes[outcome(check, data)] += 1
            except BaseException as error:
                failed.append(data)
                raise error if isinstance(error, Exception) else AssertionError(str(error)) from error

    for _ in itertools.takewhile(lambda _: cpu_seconds() < end, itertools.count()):
        run()
    print(name, dict(outcomes))
    assert outcomes["accepted"]


@pytest.mark.parametrize("name", FOUND)
def test_inputs_that_once_failed(name, tmp_path):
    _, check = TARGETS[name](tmp_path)
    for data, expected in FOUND[name]:
        assert outcome(check, data) == expected, data
