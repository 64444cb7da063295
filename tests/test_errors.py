"""Text from files in the messages of errors: escaped and short, wherever the error is raised."""

from __future__ import annotations

import inspect

import pytest

from fmtprop import errors
from fmtprop.ir.node import label_of

CLASSES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.FmtpropError)]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_message_is_safe_to_print(kind):
    hostile = "\x1b[2J\x9b31m\u202e\udc80\0" + "x" * 10**7 + "\ttail"
    first = () if kind not in (errors.VerifyError, errors.DnnlError) else ("V1",)
    error = kind(*first, f"one {hostile}\ntwo") if kind is not errors.DnnlError else kind("f", "s", hostile, "two")
    text = str(error)
    assert len(text) < 5000
    assert all(line.isprintable() for line in text.split("\n"))
    assert r"\x1b[2J\x9b31m\u202e\udc80\x00xxx" in text and text.endswith("two")


def test_a_label_is_one_line():
    assert label_of("a\nb", "relu") == r"node a\nb (relu)"
    assert len(label_of("x" * 10**7, "y" * 10**7)) < 1000
