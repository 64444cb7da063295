"""The cache on disk: right or absent, never wrong, whatever happens to the file."""

from __future__ import annotations

import errno
import os
import random
import resource
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import filelock
import pytest

from fmtprop import dnnl
from fmtprop.tuning.cache import TuningCache, default_path, key_of

RECORDS = {f"{number:032x}": (number + 1) * 1e-6 for number in range(20)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tuning.txt"


def read_quietly(path: Path) -> tuple[dict[str, float | None], int]:
    """Return what a reader gets of RECORDS, and how often it was warned."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache = TuningCache(path)
        found = {key: cache.get(key) for key in RECORDS}
    assert all(issubclass(warning.category, RuntimeWarning) for warning in caught)
    return found, len(caught)


def test_what_is_added_is_found_by_everybody(path: Path) -> None:
    cache = TuningCache(path)
    cache.add(RECORDS)
    assert {key: cache.get(key) for key in RECORDS} == RECORDS
    assert read_quietly(path) == (RECORDS, 0)
    assert TuningCache(path).get("absent") is None


def test_a_later_figure_replaces_an_earlier_one(path: Path) -> None:
    first = TuningCache(path)
    first.add({"a": 1.0, "b": 2.0})
    TuningCache(path).add({"a": 3.0})
    assert TuningCache(path).get("a") == 3.0 and TuningCache(path).get("b") == 2.0


def test_a_figure_that_another_replaced_meanwhile_stays_replaced(path: Path) -> None:
    first = TuningCache(path)
    first.add({"a": 1.0})
    slow = TuningCache(path)
    TuningCache(path).add({"a": 2.0})
    slow.add({"b": 3.0})
    assert slow.get("a") == TuningCache(path).get("a") == 2.0
    first.add({"a": 4.0})
    assert TuningCache(path).get("a") == 4.0 and TuningCache(path).get("b") == 3.0


def test_what_could_not_be_written_is_written_with_the_next(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = TuningCache(path)
    with monkeypatch.context() as patch, pytest.warns(RuntimeWarning, match="kept in memory"):
        patch.setattr(cache, "_write", lambda sync: (_ for _ in ()).throw(OSError("disk full")))
        cache.add({"a": 1.0})
    cache.add({"b": 2.0})
    assert TuningCache(path).get("a") == 1.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0])
def test_only_positive_finite_numbers_are_kept(path: Path, value: float) -> None:
    cache = TuningCache(path)
    cache.add({"bad": value, "good": 1.0})
    assert cache.get("bad") is None and cache.get("good") == 1.0
    assert "bad" not in path.read_text()


@pytest.mark.parametrize("text", ["nan", "-1.0", "inf", "0.0", "1e999", "0x1p3", "1_0.0", " 1.0", "1.00"])
def test_a_record_with_a_senseless_number_is_ignored_even_with_a_right_checksum(path: Path, text: str) -> None:
    import zlib

    TuningCache(path).add({"good": 1.0})
    body = f"bad {text}"
    with path.open("a") as file:
        file.write(f"{zlib.crc32(body.encode()):08x} {body}\n")
    with pytest.warns(RuntimeWarning, match="damaged in 1 lines"):
        cache = TuningCache(path)
    assert cache.get("bad") is None and cache.get("good") == 1.0


def test_any_flipped_byte_is_noticed_and_costs_at_most_two_records(path: Path) -> None:
    TuningCache(path).add(RECORDS)
    sound = path.read_bytes()
    rng = random.Random(1)
    for place in [*range(20), *(rng.randrange(len(sound)) for _ in range(150))]:
        damaged = bytearray(sound)
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(damaged))
        found, warned = read_quietly(path)
        assert warned == 1, place
        assert all(value in (None, RECORDS[key]) for key, value in found.items()), place
        lost = sum(value is None for value in found.values())
        in_header = place <= sound.index(b"\n")
        assert lost <= 2 or (in_header and lost == len(RECORDS))


def test_any_truncation_is_noticed(path: Path) -> None:
    TuningCache(path).add(RECORDS)
    sound = path.read_bytes()
    ends = {i + 1 for i, byte in enumerate(sound) if byte == ord("\n")}
    for length in range(0, len(sound), 7):
        path.write_bytes(sound[:length])
        found, warned = read_quietly(path)
        assert warned == (0 if length in ends else 1), length
        assert all(value in (None, RECORDS[key]) for key, value in found.items())


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 1000, os.urandom(5000), b"fmtprop tuning 2\n", b'{"json": 1}\n', b"\xff\xfe\n" * 100],
    ids=["empty", "zeros", "random", "another version", "json", "not ascii"],
)
def test_a_foreign_file_is_ignored_with_one_warning_and_replaced(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache = TuningCache(path)
        assert len(cache) == 0
        cache.add(RECORDS)
    assert len(caught) == 1 and "ignored" in str(caught[0].message)
    assert read_quietly(path) == (RECORDS, 0)


def test_a_file_larger_than_any_of_ours_is_not_even_read(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2 << 30)  # sparse
    with pytest.warns(RuntimeWarning, match="it is larger than 268435456 bytes"):
        assert len(TuningCache(path)) == 0


def test_a_directory_in_the_file_s_place_costs_one_warning(path: Path) -> None:
    path.mkdir()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache = TuningCache(path)
        cache.add(RECORDS)
        cache.add({"more": 1.0})
    assert len(caught) == 1
    assert cache.get("more") == 1.0, "what was measured is still known to this process"


def test_a_directory_that_cannot_be_made_costs_one_warning(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.touch()
    with pytest.warns(RuntimeWarning, match="cannot") as caught:
        cache = TuningCache(blocker / "deeper" / "tuning.txt")
        cache.add(RECORDS)
    assert len(caught) == 1 and cache.get(next(iter(RECORDS))) is not None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_directory_costs_one_warning(path: Path) -> None:
    TuningCache(path).add({"old": 1.0})
    path.parent.chmod(0o500)
    try:
        with pytest.warns(RuntimeWarning, match="cannot write") as caught:
            cache = TuningCache(path)
            cache.add(RECORDS)
            cache.add({"more": 1.0})
    finally:
        path.parent.chmod(0o700)
    assert len(caught) == 1
    assert TuningCache(path).get("old") == 1.0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
def test_a_disk_that_fails_in_the_middle_leaves_the_old_file(
    path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    TuningCache(path).add({"old": 1.0})
    before = path.read_bytes()

    def fail(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fmtprop.tuning.cache.os.fsync", fail)  # after the bytes went to the temporary file
    with pytest.warns(RuntimeWarning, match="cannot write") as caught:
        cache = TuningCache(path)
        cache.add(RECORDS, sync=True)
        cache.add({"more": 2.0}, sync=True)
    assert len(caught) == 1
    assert path.read_bytes() == before
    assert {file.name for file in path.parent.iterdir()} <= {path.name, f"{path.name}.lock"}
    assert cache.get("more") == 2.0


def test_a_full_disk(path: Path) -> None:
    """As good as one: the system refuses every byte beyond what the old file has."""
    TuningCache(path).add({"old": 1.0})
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before), limits[1]))
    try:
        with pytest.warns(RuntimeWarning, match="cannot write"):
            TuningCache(path).add(RECORDS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert {file.name for file in path.parent.iterdir()} <= {path.name, f"{path.name}.lock"}


def test_a_lock_that_nobody_releases_costs_one_warning(path: Path) -> None:
    with filelock.FileLock(f"{path}.lock"), pytest.warns(RuntimeWarning, match="cannot write"):
        cache = TuningCache(path, timeout=0.05)
        cache.add(RECORDS)
    assert cache.get(next(iter(RECORDS))) is not None
    assert not path.exists()


# Writers are forks of a process that has no threads yet: importing once is slow enough.
_PREFIX = """
import os, random, signal, sys, time, warnings
from pathlib import Path
from fmtprop.tuning.cache import TuningCache
warnings.simplefilter("error")
path = Path(sys.argv[1])
def writer(add):
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        add(TuningCache(path, timeout=60.0))
        status = 0
    finally:
        os._exit(status)
"""

_KILLED = """
def endlessly(cache):
    for number in range(10**9):
        cache.add({f"k{turn * 100 + number % 100}": 1.0 + turn * 100 + number % 100})
rng = random.Random(0)
size = 0
for turn in range(8):
    child = writer(endlessly)
    time.sleep(rng.uniform(0.0, 0.1))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    cache = TuningCache(path, timeout=2.0)  # sound, or this warns
    cache.add({"k0": 1.0})  # the dead writer's lock is free, or this warns
    assert len(cache) >= max(size, 1)
    assert all(cache.get(f"k{n}") in (None, 1.0 + n) for n in range(800))
    size = len(cache)
assert size > 5  # several were killed after their first record
"""

_MANY = """
children = []
for index in range(6):
    def add(cache, index=index):
        for number in range(10):
            cache.add({f"w{index}n{number}": 1.0 + index})
    children.append(writer(add))
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 6
cache = TuningCache(path)
assert all(cache.get(f"w{w}n{n}") == 1.0 + w for w in range(6) for n in range(10))
"""


@pytest.mark.parametrize("script", [_KILLED, _MANY], ids=["killed at any moment", "many at once"])
def test_writers(path: Path, script: str) -> None:
    done = subprocess.run([sys.executable, "-c", _PREFIX + script, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_keys_differ_by_problem_and_by_threads() -> None:
    import torch

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = key_of({"op": "x"})
        torch.set_num_threads(2)
        two = key_of({"op": "x"})
    finally:
        torch.set_num_threads(before)
    assert one != two
    assert key_of({"op": "x"}) != key_of({"op": "y"})


def test_keys_differ_by_library_and_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("version", "hash", "runtime", "isa", "threads")
    keys = [key_of({"op": "x"})]
    library = SimpleNamespace(**{name: getattr(dnnl.lib(), name) for name in names})
    monkeypatch.setattr(dnnl, "lib", lambda: library)
    assert key_of({"op": "x"}) == keys[0]
    for name in names:
        with monkeypatch.context() as patch:
            patch.setattr(library, name, "another")
            keys.append(key_of({"op": "x"}))
    monkeypatch.setattr("fmtprop.tuning.cache._cpu", lambda: "another")
    keys.append(key_of({"op": "x"}))
    assert len(set(keys)) == 1 + len(names) + 1


def test_the_directory_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FMTPROP_CACHE_DIR", str(tmp_path))
    assert default_path().parent == tmp_path
    TuningCache().add({"a": 1.0})
    assert TuningCache().get("a") == 1.0


def test_the_disk_is_waited_for_where_it_pays(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr("fmtprop.tuning.cache.os.fsync", synced.append)
    TuningCache(path).add({"quick": 1.0})
    assert not synced
    TuningCache(path).add({"slow": 1.0}, sync=True)
    assert len(synced) == 1
    assert TuningCache(path).get("quick") == TuningCache(path).get("slow") == 1.0
