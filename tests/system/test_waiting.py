from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fmtprop.system.waiting import Waiting


def thread(tasks: Path, name: str, waited: int) -> None:
    (tasks / name).mkdir(exist_ok=True)
    (tasks / name / "schedstat").write_text(f"5000000 {waited} 7\n", encoding="ascii")


def test_the_longest_wait_since_the_last_call_counts(tmp_path: Path) -> None:
    thread(tmp_path, "1", 10**9)
    thread(tmp_path, "2", 0)
    with Waiting(tmp_path) as waiting:
        assert waiting.lap() == 0.0
        thread(tmp_path, "1", 10**9 + 10**6)
        thread(tmp_path, "2", 4 * 10**6)
        thread(tmp_path, "3", 10**9)  # what a thread waited before it was seen belongs to no lap
        assert waiting.lap() == pytest.approx(4e-3)
        assert waiting.lap() == 0.0


def test_files_that_are_missing_or_foreign_tell_nothing(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    thread(tmp_path, "2", 0)
    (tmp_path / "2" / "schedstat").write_text("nothing", encoding="ascii")
    with Waiting(tmp_path) as waiting:
        assert waiting.lap() == 0.0


def test_no_file_stays_open() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with Waiting() as waiting:
        waiting.lap()
    assert set(os.listdir("/proc/self/fd")) <= before


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not count waiting")
def test_a_thread_that_shares_its_processor_waits() -> None:
    allowed = os.sched_getaffinity(0)
    one = min(allowed)
    loop = f"import os\nos.sched_setaffinity(0, [{one}])\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", loop], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            os.sched_setaffinity(0, [one])
            waited, end = 0.0, time.monotonic() + 20.0
            with Waiting() as waiting:
                while waited == 0.0 and time.monotonic() < end:
                    sum(range(1_000_000))
                    waited += waiting.lap()
        finally:
            os.sched_setaffinity(0, allowed)
            other.kill()
    assert waited > 0
