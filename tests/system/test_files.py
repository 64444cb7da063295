"""What is read is a regular file of a bounded size; what is replaced is ours; who may read it is the process's mask."""

from __future__ import annotations

import errno
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fmtprop.system.files import check_readable, check_regular, check_replaceable, locked, read, replacing

OURS = re.compile(b"ours")


def odd_places(folder: Path) -> dict[str, Path]:
    """Return what may stand where a file is expected, by the words for it."""
    (folder / "folder").mkdir()
    os.mkfifo(folder / "fifo")
    (folder / "endless").symlink_to("/dev/zero")
    (folder / "to_folder").symlink_to(folder / "folder")
    return {
        "a directory": folder / "folder",
        "a fifo": folder / "fifo",
        "a device": folder / "endless",
        "a directory, not": folder / "to_folder",
    }


@pytest.mark.parametrize(
    "use",
    [
        lambda path: read(path, 10),
        check_readable,
        check_replaceable,
        check_regular,
        lambda path: replacing(path).__enter__(),
    ],
    ids=["read", "check_readable", "check_replaceable", "check_regular", "replacing"],
)
def test_what_is_no_file_is_called_what_it_is(tmp_path, use):
    for words, path in odd_places(tmp_path).items():
        with pytest.raises(OSError) as raised:
            use(path)
        assert f"it is {words}" in raised.value.strerror
    (tmp_path / "itself").symlink_to(tmp_path / "itself")
    with pytest.raises(OSError):
        use(tmp_path / "itself")


def test_a_lock_that_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "cache.lock")
    with pytest.raises(OSError, match="it is a fifo"), locked(tmp_path / "cache", 1):
        pass
    (tmp_path / "other.lock").symlink_to(tmp_path / "precious")
    (tmp_path / "precious").write_text("text")
    with pytest.raises(OSError, match="it is a link"), locked(tmp_path / "other", 1):
        pass
    assert (tmp_path / "precious").read_text() == "text"


def test_a_lock_that_another_holds(tmp_path):
    held = "import sys, filelock; lock = filelock.FileLock(sys.argv[1]); lock.acquire(); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", held, tmp_path / "cache.lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        with pytest.raises(TimeoutError, match="another process holds its lock"), locked(tmp_path / "cache", 0.01):
            pass
        process.communicate(b"\n")
    with locked(tmp_path / "cache", 1):
        pass


def test_reads_are_bounded(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    assert read(path, 10) == b"0123456789"
    with pytest.raises(OSError, match="it is larger than 9 bytes"):
        read(path, 9)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none", 9)
    (tmp_path / "link").symlink_to(tmp_path / "none")
    with pytest.raises(OSError, match="it is a link to nothing"):
        read(tmp_path / "link", 9)


def test_only_files_of_ours_are_replaced(tmp_path):
    path, alias, link = tmp_path / "file", tmp_path / "alias", tmp_path / "link"
    path.write_bytes(b"somebody else's")
    os.link(path, alias)
    link.symlink_to(path)
    for name in (path, alias, link):
        with pytest.raises(OSError, match="did not come from here and is not replaced") as raised:
            check_replaceable(name, OURS)
        assert raised.value.errno == errno.EEXIST
    for content in (b"ours, older", b""):
        path.write_bytes(content)
        with replacing(path, OURS) as temporary:
            temporary.write_bytes(b"ours, newer")
        assert path.read_bytes() == b"ours, newer"
    with replacing(link, OURS) as temporary:
        temporary.write_bytes(b"ours, newest")
    assert link.is_symlink() and path.read_bytes() == b"ours, newest"
    assert alias.read_bytes() == b"ours, older"  # another file since it was replaced


def test_nothing_is_left_of_a_failure(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"ours")

    def fail() -> None:
        with replacing(path, OURS) as temporary:
            temporary.write_bytes(b"ours, half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_bytes() == b"ours" and list(tmp_path.iterdir()) == [path]


def test_no_directory(tmp_path):
    with pytest.raises(OSError, match=r"the directory .*gone does not exist; create it first"):
        check_replaceable(tmp_path / "gone" / "file")


def test_no_permission(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # tests may run as root, who may write everywhere
    with pytest.raises(PermissionError, match="no permission; choose another place"):
        check_replaceable(tmp_path / "file")


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_mask_says_who_may_read(tmp_path, mask, mode):
    path, before = tmp_path / "file", os.umask(mask)
    try:
        with replacing(path) as temporary:
            temporary.unlink()
            temporary.touch(0o600)  # as writers do that have ideas of their own
            temporary.chmod(0o600)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    path.chmod(0o640)
    with replacing(path):
        pass
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
