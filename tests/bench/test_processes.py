"""A process for each contender: paired turns, quiet ends, and what happens to those that are wrong, absent or dead."""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import pytest

from fmtprop.bench import Agreement
from fmtprop.bench.processes import Prepared, call_in_process, converse, interleave_processes, settle
from fmtprop.errors import FmtpropError

PASSED = Agreement(True, 0.0, 1e-4)


def prepare_good(parent: int) -> Prepared:
    assert os.getpid() != parent, "a contender must not run in the parent"
    return Prepared(partial(sum, range(1000)), PASSED, {"good": "1.0"})


def prepare_wrong() -> Prepared:
    return Prepared(_never, Agreement(False, 0.5, 1e-4, "output 0 is wrong"), {"wrong": "2.0"})


def prepare_absent() -> Prepared:
    raise FmtpropError("package 'absent' is not installed")


def prepare_mortal() -> Prepared:
    return Prepared(partial(os._exit, 7), PASSED)


def refuse() -> None:
    raise FmtpropError("no such thing")


def _never() -> None:
    """Take its turn; a contender that is wrong is warmed up, but has none."""


def test_only_those_that_agree_have_figures() -> None:
    said: list[tuple[str, int, int]] = []
    contenders: dict[str, Callable[[], Prepared]] = {
        "good": partial(prepare_good, os.getpid()),
        "wrong": prepare_wrong,
        "absent": prepare_absent,
    }
    result = interleave_processes(
        contenders, reference="good", rounds=3, repeats=2, threads=1, progress=lambda *what: said.append(what)
    )
    good, wrong, absent = result.entries
    assert len(good.milliseconds) == 3 and good.speedup is not None and good.speedup.median == 1.0
    assert wrong.latency is None and wrong.speedup is None and wrong.agreement.message == "output 0 is wrong"
    assert absent.latency is None and absent.agreement.message == "cannot run here: package 'absent' is not installed"
    assert wrong.agreement.ran and not absent.agreement.ran
    assert math.isinf(absent.agreement.error)
    assert result.environment.versions["good"] == "1.0" and result.environment.threads == 1
    assert [what for what, _, _ in said] == ["preparing good", "preparing wrong", "preparing absent", *["timing"] * 3]
    assert said[-1] == ("timing", 3, 3)


def prepare_disturbed() -> Prepared:
    """Return a contender that is slow until the end of its first turn: a warm-up, an untimed and a timed run."""
    pauses = iter([0.05] * 3)
    return Prepared(lambda: time.sleep(next(pauses, 0.0)), PASSED)


def test_the_first_turn_does_not_count() -> None:
    result = interleave_processes({"first": prepare_disturbed}, reference="first", rounds=2, repeats=1, warmup=1)
    assert max(result["first"].milliseconds) < 40


def test_a_dead_contender_is_an_error() -> None:
    message = "^the process of mortal ended with exit code 7; its output has the reason$"
    with pytest.raises(FmtpropError, match=message):
        interleave_processes({"mortal": prepare_mortal}, reference="mortal", rounds=1)


def prepare_counter(start: int) -> Callable[[], tuple[int, int]]:
    numbers = iter(range(start, start + 100))
    return lambda: (os.getpid(), next(numbers))


def prepare_refusal() -> Callable[[], None]:
    return refuse


def test_converse() -> None:
    answers = converse({"low": partial(prepare_counter, 0), "high": partial(prepare_counter, 50)}, rounds=3)
    assert [number for _, number in answers["low"]] == [0, 1, 2]
    assert [number for _, number in answers["high"]] == [50, 51, 52]
    processes = [{process for process, _ in given} for given in answers.values()]
    assert len(processes[0]) == len(processes[1]) == 1 and len(set.union(*processes, {os.getpid()})) == 3
    with pytest.raises(FmtpropError, match=r"^refusal: no such thing$"):
        converse({"refusal": prepare_refusal}, rounds=1)
    with pytest.raises(FmtpropError, match=r"^early: package 'absent' is not installed$"):
        converse({"early": prepare_absent}, rounds=1)  # type: ignore[dict-item]


def test_call_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # here in a new process, as benchmarks are
    assert call_in_process("elsewhere", os.getpid) != os.getpid()
    with pytest.raises(FmtpropError, match=r"^thing: no such thing$"):
        call_in_process("thing", refuse)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"reference": "other"}, "reference 'other' is not one of the contenders: wrong"),
        ({"rounds": 0}, "interleave_processes: rounds is 0, must be at least 1"),
        ({"repeats": 0}, "interleave_processes: repeats is 0, must be at least 1"),
        ({"warmup": -1}, "interleave_processes: warmup is -1, must be at least 0"),
    ],
)
def test_arguments_are_checked(changed: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"reference": "wrong", **changed}
    with pytest.raises(FmtpropError) as caught:
        interleave_processes({"wrong": prepare_wrong}, **arguments)  # type: ignore[arg-type]
    assert str(caught.value) == message


class Spinner:
    """A process whose pool burns one core until some moment; time passes only in sleep."""

    def __init__(self, until: float) -> None:
        self.now, self.until = 0.0, until

    def clock(self) -> float:
        return self.now

    def used(self) -> float:
        return min(self.now, self.until)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def settle(self) -> None:
        settle(self.used, self.sleep, self.clock)


@pytest.mark.parametrize("until", [0.0, 0.05, 1.0])
def test_settle_waits_for_the_end_of_spinning(until: float) -> None:
    process = Spinner(until)
    process.settle()
    assert until + 0.015 < process.now < until + 0.035  # two quiet windows of 10 ms, the first not before the end


BUSY = """
import time
print("starts", flush=True)
while time.process_time() < 0.5:
    pass
print("rests", flush=True)
time.sleep(60)
"""


def test_settle_waits_for_the_processes_that_this_one_started() -> None:
    shell = f"{sys.executable} -c '{BUSY}'; true"  # a grandchild: the shell waits for it
    with subprocess.Popen(["sh", "-c", shell], stdout=subprocess.PIPE, start_new_session=True) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == b"starts\n"
            settle()
            assert select.select([child.stdout], [], [], 0)[0], "it is still busy"
        finally:
            os.killpg(child.pid, signal.SIGKILL)


def test_settle_gives_up() -> None:
    with pytest.raises(FmtpropError, match=r"has kept its cores busy for 10 s.*leave this contender out"):
        Spinner(math.inf).settle()
