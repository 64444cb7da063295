from __future__ import annotations

import os
import resource

from fmtprop.system.machine import memory_nbytes

PHYSICAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_container_s_share_counts(tmp_path):
    limit = tmp_path / "memory.max"
    assert memory_nbytes([limit]) == memory_nbytes([])
    for text, expected in (("max\n", memory_nbytes([])), ("1000000\n", 1_000_000), (f"{2**63}\n", memory_nbytes([]))):
        limit.write_text(text)
        assert memory_nbytes([tmp_path / "none", limit]) == expected


def test_ulimit_counts():
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = PHYSICAL - 1
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        assert memory_nbytes([]) == limit
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert memory_nbytes([]) <= PHYSICAL
