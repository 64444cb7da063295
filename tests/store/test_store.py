"""The store on disk: right or absent, never wrong, whatever happens to the file."""

from __future__ import annotations

import os
import random
import resource
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
import zlib
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from fmtprop import dnnl
from fmtprop.errors import LoadError
from fmtprop.store import Store, cache_directory, database, key_of
from fmtprop.store.store import default_path
from tests.threads import torch_threads

FIGURES = {f"{number:032x}": (number + 1) * 1e-6 for number in range(20)}
NAMES = {f"model {number}": f"variant {number}" for number in range(5)}
PASSED = {f"check {number}" for number in range(5)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.sqlite"


def test_a_store_tells_whether_it_has_other_figures(path: Path) -> None:
    store = Store(path)
    store.remember("model", "variant")
    assert not store.has_figures()
    store.add_figures({"peak": 1.0})
    assert store.has_figures() and not store.has_figures(besides=["peak"])


def fill(path: Path) -> Store:
    store = Store(path)
    store.add_figures(FIGURES)
    for key, name in NAMES.items():
        store.remember(key, name)
    store.add_passed(PASSED)
    return store


def lost_of(store: Store) -> int:
    """Return how many records are not there; those that are there are right."""
    figures = {key: store.figure(key) for key in FIGURES}
    names = {key: store.verdict(key) for key in NAMES}
    assert all(value in (None, FIGURES[key]) for key, value in figures.items())
    assert all(name in (None, NAMES[key]) for key, name in names.items())
    assert len(store) <= len(FIGURES) + len(NAMES) + len(PASSED), "a record that nobody added"
    return sum(found is None for found in (*figures.values(), *names.values())) + sum(
        not store.has_passed(key) for key in PASSED
    )


def lost_in(path: Path) -> tuple[int, int]:
    """Return how many records a new reader does not get, and how often it is warned."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lost = lost_of(Store(path))
    assert all(issubclass(warning.category, RuntimeWarning) for warning in caught)
    return lost, len(caught)


def files_of(path: Path) -> set[str]:
    return {file.name.removeprefix(path.name) for file in path.parent.iterdir()}


# ---------------------------------------------------------------- records


def test_what_is_added_is_found_by_everybody(path: Path) -> None:
    assert lost_of(fill(path)) == 0
    assert lost_in(path) == (0, 0)
    store = Store(path)
    assert store.figure("absent") is None and store.verdict("absent") is None and not store.has_passed("absent")
    assert files_of(path) == {""}, "neither journal nor lock stays"


def test_a_file_that_nobody_else_changed_is_read_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(path).add_figures({"ours": 1.0})
    time.sleep(0.05)  # a file has a new time of change after a tick of the system's clock
    assert Store(path).figure("ours") == 1.0
    Store(path).add_figures({"more": 3.0})
    time.sleep(0.05)
    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", lambda *_, **__: pytest.fail("it is read again"))
        old = Store(path)
        assert old.figure("ours") == 1.0 and old.figure("more") == 3.0
    code = "import sys; from pathlib import Path; from fmtprop.store import Store"
    code = f"{code}; Store(Path(sys.argv[1])).add_figures({{'ours': 2.0}})"
    subprocess.run([sys.executable, "-c", code, path], check=True)
    assert Store(path).figure("ours") == 2.0 and Store(path).figure("more") == 3.0
    old.add_figures({"late": 4.0})  # it does not know the other process's record
    assert Store(path).figure("ours") == 2.0 and Store(path).figure("late") == 4.0
    path.unlink()
    assert len(Store(path)) == 0


def test_kinds_share_no_keys(path: Path) -> None:
    store = Store(path)
    store.add_figures({"a": 1.0})
    store.remember("b", "name")
    for again in (store, Store(path)):
        assert again.verdict("a") is None and again.figure("b") is None
        assert not again.has_passed("a") and not again.has_passed("b")


def test_a_later_record_replaces_an_earlier_one(path: Path) -> None:
    first = Store(path)
    first.add_figures({"a": 1.0, "b": 2.0})
    first.remember("model", "optimal")
    second = Store(path)
    second.add_figures({"a": 3.0})
    second.remember("model", "propagate")
    again = Store(path)
    assert (again.figure("a"), again.figure("b"), again.verdict("model")) == (3.0, 2.0, "propagate")


def test_what_another_replaced_meanwhile_stays_replaced(path: Path) -> None:
    first = Store(path)
    first.add_figures({"a": 1.0})
    slow = Store(path)
    Store(path).add_figures({"a": 2.0})
    slow.add_figures({"b": 3.0})
    assert Store(path).figure("a") == 2.0 and Store(path).figure("b") == 3.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0])
def test_only_positive_finite_figures_are_kept(path: Path, value: float) -> None:
    store = Store(path)
    store.add_figures({"bad": value, "good": 1.0})
    for one in (store, Store(path)):
        assert one.figure("bad") is None and one.figure("good") == 1.0 and len(one) == 1


@pytest.mark.parametrize("value", [float("inf"), -1.0, 0.0, 1, None, b"1.0"])
def test_a_senseless_figure_is_left_out_even_with_a_right_checksum(path: Path, value: object) -> None:
    Store(path).add_figures({"good": 1.0})
    with closing(sqlite3.connect(path)) as connection, connection:
        checksum = zlib.crc32(f"figure bad {value!r}".encode())
        connection.execute("INSERT INTO record VALUES ('figure', 'bad', ?, ?)", (value, checksum))
    with pytest.warns(RuntimeWarning, match="damaged in 1 records"):
        store = Store(path)
    assert store.figure("bad") is None and store.figure("good") == 1.0


def test_the_oldest_records_go(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "MOST_RECORDS", 3)
    store = Store(path)
    for key in "abcd":
        store.add_figures({key: 1.0})
    store.add_figures({"b": 2.0})  # which makes it new
    store.add_figures({"e": 1.0})
    again = Store(path)
    assert [key for key in "abcde" if again.figure(key) is not None] == ["b", "d", "e"]


def test_the_disk_is_waited_for_where_it_pays(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    honest = sqlite3.connect

    def connect(*how: object, **more: object) -> sqlite3.Connection:
        connection = honest(*how, **more)
        connection.set_trace_callback(said.append)
        return connection

    monkeypatch.setattr(sqlite3, "connect", connect)
    for sync, level in ((False, "OFF"), (True, "FULL")):
        said.clear()
        Store(path).add_figures({"a": 1.0}, sync=sync)
        levels = [text for text in said if "synchronous" in text]
        assert levels == [f"PRAGMA synchronous = {level}"]


# ---------------------------------------------------------------- damage


def test_a_flipped_byte_gives_no_wrong_record_and_is_repaired(path: Path) -> None:
    fill(path)
    sound = path.read_bytes()
    rng = random.Random(1)
    noticed = 0
    for place in [*range(0, 100, 3), *(rng.randrange(len(sound)) for _ in range(120))]:
        damaged = bytearray(sound)
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(damaged))
        lost, warned = lost_in(path)
        assert warned <= 1 and (warned == 1 or lost == 0), place
        noticed += warned
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Store(path).add_figures({next(iter(FIGURES)): 1e-6})
        assert len(caught) <= 1, place
        again, warned = lost_in(path)
        assert again <= lost and (warned == 0 or "readonly" in str(caught[0].message)), place
    assert noticed > 20


def test_a_flipped_byte_of_a_record_costs_this_record(path: Path) -> None:
    fill(path)
    sound = path.read_bytes()
    for text in (b"variant 3", b"check 2", f"{7:032x}".encode()):
        place = sound.index(text)
        path.write_bytes(sound[:place] + b"x" + sound[place + 1 :])
        assert lost_in(path) == (1, 1), text


def test_text_that_is_none_is_damage(path: Path) -> None:
    fill(path)
    sound = path.read_bytes()
    place = sound.index(b"variant 3")
    path.write_bytes(sound[:place] + b"\xff" + sound[place + 1 :])
    lost, warned = lost_in(path)
    assert 1 <= lost < len(FIGURES) and warned == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fill(path)
    assert lost_in(path) == (0, 0)


def test_a_truncated_file_is_noticed_and_replaced(path: Path) -> None:
    fill(path)
    sound = path.read_bytes()
    for length in range(10, len(sound), 501):
        path.write_bytes(sound[:length])
        lost, warned = lost_in(path)
        assert warned == (lost > 0), length
        assert lost > 0 or length > len(sound) * 2 // 3, "what is missing is the index alone"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Store(path).add_figures({"more": 1.0})
        assert Store(path).figure("more") == 1.0


def foreign_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE VIEW record AS SELECT 1")


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_bytes(b"\0" * 1000),
        lambda path: path.write_bytes(os.urandom(5000)),
        lambda path: path.write_bytes(b'{"json": 1}\n'),
        lambda path: path.write_bytes(b"SQLite format 3\0" + b"\xff" * 5000),
        foreign_database,
    ],
    ids=["zeros", "random", "json", "a header", "another database"],
)
def test_a_foreign_file_is_ignored_with_one_warning_and_replaced(path: Path, make) -> None:
    make(path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store = Store(path)
        assert len(store) == 0
        store.add_figures(FIGURES)
    assert len(caught) == 1 and "ignored" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Store(path).figure(next(iter(FIGURES))) == 1e-6


def test_an_empty_file_is_one_without_records(path: Path) -> None:
    """A process that is killed between making the file and writing to it leaves one."""
    path.touch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(Store(path)) == 0
        fill(path)
    assert lost_in(path) == (0, 0)


def test_a_journal_of_nothing_does_no_harm(path: Path) -> None:
    fill(path)
    Path(f"{path}-journal").write_bytes(os.urandom(2000))
    assert lost_in(path) == (0, 0)


def test_a_file_larger_than_any_of_ours_is_not_even_read(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2 << 30)  # sparse
    with pytest.warns(RuntimeWarning, match="it is larger than 268435456 bytes"):
        assert len(Store(path)) == 0


# ---------------------------------------------------------------- what is no file, and what cannot be written


def in_the_way(path: Path, kind: str) -> Path:
    """Put something else where the file or its journal belongs."""
    place = Path(f"{path}-journal") if kind.startswith("journal") else path
    if kind.endswith("directory"):
        place.mkdir()
    elif kind.endswith("fifo"):
        os.mkfifo(place)
    else:
        place.symlink_to("/dev/zero")
    return place


KINDS = ["directory", "fifo", "link to a device", "journal a directory", "journal a fifo", "journal a link to a device"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_costs_one_warning(path: Path, kind: str) -> None:
    if kind.startswith("journal"):
        path.touch()
    place = in_the_way(path, kind)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store = fill(path)
        store.add_figures({"more": 1.0})
    (warning,) = caught
    assert "cannot read the cache" in str(warning.message) and f"it is a {kind.split(' ')[-1]}" in str(warning.message)
    assert store.figure("more") == 1.0, "what was found out is still known to this process"
    assert place.is_dir() or place.is_fifo() or place.is_symlink(), "it was not replaced"


def test_a_link_to_a_file_is_followed(path: Path, tmp_path: Path) -> None:
    real = tmp_path / "elsewhere.sqlite"
    fill(real)
    path.symlink_to(real)
    assert lost_in(path) == (0, 0)
    Store(path).add_figures({"more": 1.0})
    assert path.is_symlink() and Store(real).figure("more") == 1.0


def test_a_directory_that_cannot_be_made_costs_one_warning(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.touch()
    with pytest.warns(RuntimeWarning, match="cannot") as caught:
        store = fill(blocker / "deeper" / "store.sqlite")
    assert len(caught) == 1 and lost_of(store) == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("what", ["directory", "file"])
def test_what_is_read_only_costs_one_warning(path: Path, what: str) -> None:
    fill(path)
    place, before = (path.parent, 0o700) if what == "directory" else (path, 0o600)
    place.chmod(before & 0o555)
    try:
        assert lost_in(path) == (0, 0)
        with pytest.warns(RuntimeWarning, match="cannot write") as caught:
            store = Store(path)
            store.add_figures({"new": 1.0})
            store.add_figures({"more": 1.0})
    finally:
        place.chmod(before)
    assert len(caught) == 1
    assert lost_in(path) == (0, 0)


def test_a_full_disk_leaves_the_old_records(path: Path) -> None:
    """As good as one: the system refuses every byte beyond what the old file has."""
    fill(path)
    time.sleep(0.05)  # the file is at rest, so stores share its records
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, limits[1]))
    try:
        with pytest.warns(RuntimeWarning, match="cannot write") as caught:
            store = Store(path)
            store.add_figures({f"new {number}": 1.0 for number in range(1000)})
            store.add_figures({"more": 1.0}, sync=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(caught) == 1 and store.figure("more") == 1.0
    assert lost_in(path) == (0, 0)
    store.add_figures({"last": 1.0})  # what could not be written is written with the next
    again = Store(path)
    assert again.figure("new 999") == again.figure("more") == again.figure("last") == 1.0
    assert files_of(path) == {""}


def test_another_process_that_keeps_the_file_costs_one_warning(path: Path) -> None:
    fill(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.warns(RuntimeWarning, match="locked") as caught:
            store = Store(path, timeout=0.05)
            store.add_figures({"new": 1.0})
    assert len(caught) == 1 and store.figure("new") == 1.0
    store.add_figures({"more": 1.0})
    assert Store(path).figure("new") == 1.0


# ---------------------------------------------------------------- processes and threads

# Writers are forks of a process that has no threads yet: importing once is slow enough.
_PREFIX = """
import os, random, signal, sys, threading, time, warnings
from pathlib import Path
from fmtprop.store import Store
warnings.simplefilter("error")
path = Path(sys.argv[1])
def writer(add):
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        add(Store(path, timeout=60.0))
        status = 0
    finally:
        os._exit(status)
"""

_KILLED = """
def endlessly(store):
    for number in range(10**9):
        store.add_figures({f"k{turn * 100 + number % 100}": 1.0 + turn * 100 + number % 100}, sync=number % 7 == 0)
        os.write(said, b"%d\\n" % number)
rng = random.Random(0)
size = 0
for turn in range(8):
    heard, said = os.pipe()
    child = writer(endlessly)
    os.close(said)
    time.sleep(rng.uniform(0.0, 0.1))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    promised = len(os.read(heard, 1 << 20).split())
    os.close(heard)
    store = Store(path, timeout=2.0)  # sound, or this warns
    assert all(store.figure(f"k{turn * 100 + n}") is not None for n in range(min(promised, 100)))
    store.add_figures({"k0": 1.0})  # the dead writer's lock is free, or this warns
    assert len(store) >= max(size, 1)
    assert all(store.figure(f"k{n}") in (None, 1.0 + n) for n in range(800))
    size = len(store)
assert size > 5  # several were killed after their first record
"""

_MANY = """
children = []
for index in range(6):
    def add(store, index=index):
        for number in range(10):
            store.add_figures({f"w{index}n{number}": 1.0 + index})
    children.append(writer(add))
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 6
store = Store(path)
assert all(store.figure(f"w{w}n{n}") == 1.0 + w for w in range(6) for n in range(10))
"""

_FORKED = """
warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
parent, stop = Store(path), threading.Event()
def busy(index):
    for number in range(10**9):
        if stop.is_set():
            break
        parent.add_figures({f"t{index}": 1.0 + number})
threads = [threading.Thread(target=busy, args=(index,)) for index in range(3)]
for thread in threads:
    thread.start()
children = [writer(lambda store, number=number: store.add_figures({f"c{number}": 1.0})) for number in range(30)]
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 30
child = os.fork()  # which goes on with the store of its parent
if child == 0:
    parent.add_figures({"inherited": 1.0})
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
stop.set()
for thread in threads:
    thread.join()
store = Store(path)
assert all(store.figure(f"c{number}") == 1.0 for number in range(30)) and store.figure("inherited") == 1.0
"""

_REPLACED = """
warnings.simplefilter("ignore")
for turn in range(10):
    path.write_bytes(os.urandom(3000))
    children = [writer(lambda store, n=n: store.add_figures({f"r{turn}n{n}": 1.0})) for n in range(4)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    store = Store(path)
    assert all(store.figure(f"r{turn}n{n}") == 1.0 for n in range(4)), turn
"""


@pytest.mark.parametrize(
    "script",
    [_KILLED, _MANY, _FORKED, _REPLACED],
    ids=["killed at any moment", "many at once", "forked while threads write", "many find garbage"],
)
def test_writers(path: Path, script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PREFIX + script, str(path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_threads_share_a_store(path: Path) -> None:
    store = Store(path)

    def add(index: int) -> None:
        for number in range(10):
            store.add_figures({f"t{index}n{number}": 1.0})

    threads = [threading.Thread(target=add, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store) == len(Store(path)) == 40


# ---------------------------------------------------------------- keys and places


def test_keys_differ_by_problem_and_by_threads() -> None:
    with torch_threads(1):
        one = key_of({"op": "x"})
    with torch_threads(2):
        two = key_of({"op": "x"})
    assert one != two
    assert key_of({"op": "x"}) != key_of({"op": "y"})


def test_without_a_library_keys_differ_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def missing() -> object:
        raise LoadError("none")

    monkeypatch.setattr(dnnl, "lib", missing)
    keys = {key_of({"op": "x"})}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    keys.add(key_of({"op": "x"}))
    monkeypatch.setattr(torch, "__version__", "another")
    keys.add(key_of({"op": "x"}))
    assert len(keys) == 3


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
    monkeypatch.setattr("fmtprop.store.store._cpu", lambda: "another")
    keys.append(key_of({"op": "x"}))
    assert len(set(keys)) == 1 + len(names) + 1


@pytest.mark.usefixtures("own_cache")
def test_the_file_is_of_this_library_and_instruction_set(tmp_path: Path) -> None:
    path = default_path()
    assert path.parent == tmp_path == cache_directory()
    assert dnnl.lib().isa in path.name and dnnl.lib().hash[:12] in path.name
    Store().add_figures({"a": 1.0})
    assert path.is_file() and Store().figure("a") == 1.0


def test_without_an_override_the_directory_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FMTPROP_CACHE_DIR", raising=False)
    assert cache_directory().name == "fmtprop"
