"""Texts by key: kept for later processes, and ignored where their file is damaged."""

from __future__ import annotations

import errno
import logging
import os

import pytest

from fmtprop.store import keep_text, text_of, texts


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("FMTPROP_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / texts.FOLDER


def test_a_text_is_kept_until_another_takes_its_place():
    assert text_of("a") is None
    keep_text("a", "first ✓")
    assert text_of("a") == "first ✓"
    keep_text("a", "second")
    assert text_of("a") == "second"
    assert text_of("b") is None


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:9] + b"?" + data[10:], lambda data: b""])
def test_a_damaged_file_has_no_text(directory, damage):
    keep_text("a", "text " * 9)
    file = directory / "a.z"
    file.write_bytes(damage(file.read_bytes()))
    assert text_of("a") is None


def test_a_file_of_another_kind_stays(directory, caplog):
    directory.mkdir(parents=True)
    (directory / "a.z").write_bytes(b"something else")
    with caplog.at_level(logging.WARNING):
        keep_text("a", "text")
    assert "is not replaced" in caplog.text
    assert (directory / "a.z").read_bytes() == b"something else"


def test_the_oldest_texts_go(directory, monkeypatch):
    monkeypatch.setattr(texts, "MOST_TEXTS", 2)
    for number, key in enumerate("abc"):
        keep_text(key, key)
        os.utime(directory / f"{key}.z", (number, number))
    keep_text("d", "d")
    assert [text_of(key) for key in "abcd"] == [None, None, "c", "d"]


@pytest.mark.parametrize(("number", "is_told"), [(errno.EROFS, False), (errno.EACCES, False), (errno.ENOSPC, True)])
def test_a_folder_that_nobody_may_write_is_told_once_by_the_store(monkeypatch, caplog, number, is_told):
    def refused(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(texts.files, "replacing", refused)
    with caplog.at_level(logging.WARNING):
        keep_text("a", "text")
    assert ("plans again" in caplog.text) == is_told
