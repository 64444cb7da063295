"""Each variant of nodes and graphs has a measured gain: one without goes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fmtprop.passes.optimal.variants import EXPANSIONS, FUSIONS, OF_GRAPH

DOCS = Path(__file__).parents[2]
VARIANTS = (*EXPANSIONS, *FUSIONS, *OF_GRAPH)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_variant_saves_two_percent_of_a_networks_time(variant):
    ratios = [float(number) for number in re.findall(r"\b[01]\.\d{1,2}\b", variant.gain)]
    assert min(ratios) <= 0.98
    (document,) = re.findall(r"docs/\w+\.md", variant.gain)
    text = (DOCS / document).read_text()
    networks = [name for name in re.findall(r"\b[A-Z][\w-]+", variant.gain) if not name.startswith("AVX")]
    assert networks and all(name in text for name in networks), networks


def test_no_two_variants_have_one_name():
    names = [variant.name for variant in VARIANTS]
    assert len(set(names)) == len(names)
