"""Words in memory are compared with what they were."""

from __future__ import annotations

import pytest
import torch

from fmtprop.jit import Words, no_code

pytestmark = pytest.mark.skipif(bool(no_code()), reason=no_code())


def test_a_change_of_any_word_is_seen_and_its_end_too():
    numbers = torch.arange(5, dtype=torch.int32)
    watch = Words([numbers.data_ptr() + 4 * place for place in (0, 2, 4)])
    assert not watch.has_changed
    for place in (0, 2, 4):
        before = int(numbers[place])
        numbers[place] = -1
        assert watch.has_changed
        numbers[place] = before
        assert not watch.has_changed
    numbers[1] = 7
    assert not watch.has_changed


def test_nothing_is_watched():
    assert not Words([]).has_changed
