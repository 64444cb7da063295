"""Random quantized graphs: int8 and float plans agree, and none crashes."""

from __future__ import annotations

import pytest

from tests.models.fuzz_quantized import check


@pytest.mark.parametrize("seed", range(12))
def test_a_random_quantized_graph(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 2000, 100))
def test_two_thousand(first: int) -> None:
    for seed in range(first, first + 100):
        check(seed)
