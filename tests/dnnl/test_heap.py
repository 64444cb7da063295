"""Freed memory goes back to the system, or stays."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fmtprop import dnnl
from fmtprop.dnnl import heap
from fmtprop.targets.memory import huge_bytes


def resident() -> int:
    """Return this process's resident bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_trim_returns_what_was_freed():
    # chunks below malloc's mmap threshold stay in the heap when they are freed behind one that is alive
    chunks = [np.ones(60_000, np.uint8) for _ in range(2_000)]
    last = chunks[-1]
    before = resident()
    del chunks[:-1]
    assert dnnl.trim_heap()
    assert before - resident() > 60e6
    assert last.sum() == 60_000


FAULTS = """
import ctypes, resource
from fmtprop.dnnl.heap import keep_heap
library = ctypes.CDLL(None)
library.malloc.argtypes, library.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
library.free.argtypes, library.free.restype = (ctypes.c_void_p,), None
def run():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [library.malloc(3 << 20) for _ in range(8)]
    for block in blocks:
        ctypes.memset(block, 1, 3 << 20)
    for block in blocks:
        library.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
young = [run() for _ in range(4)][-1]
keep_heap()
print(young, [run() for _ in range(2)][-1])
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="needs glibc")
def test_a_run_in_a_kept_heap_has_no_page_faults():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, env=environment)
    young, kept = map(int, done.stdout.split())
    assert kept < young / 10, (young, kept)


def huge_nbytes(address: int) -> int:
    """Return the bytes of huge pages in the mapping of an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-", line):
            begin, end = (int(one, 16) for one in line.split()[0].split("-"))
            inside = begin <= address < end
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    return 0


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads /proc")
def test_memory_moves_to_huge_pages_with_its_contents(monkeypatch):
    numbers = torch.arange(32 << 20, dtype=torch.int32)  # malloc maps so much apart
    address = numbers.data_ptr() + numbers.nbytes // 2
    monkeypatch.setattr(heap, "_own_mappings", lambda _: [])  # as if all were shared with another process
    before = huge_nbytes(address)
    dnnl.use_huge_pages([(numbers.data_ptr(), numbers.nbytes)])
    assert huge_nbytes(address) == before
    monkeypatch.undo()
    dnnl.use_huge_pages([(numbers.data_ptr(), numbers.nbytes)])
    assert torch.equal(numbers, torch.arange(32 << 20, dtype=torch.int32))
    if huge_nbytes(address) == before:
        pytest.skip("this system has no huge pages to give")
    assert huge_nbytes(address) >= numbers.nbytes // 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_memory_that_a_fork_shares_is_left(tmp_path):
    """In a child, its parent's weights would be in memory twice."""
    numbers = torch.ones(32 << 20)
    address = numbers.data_ptr() + numbers.nbytes // 2
    if not list(heap._own_mappings(Path("/proc/self/smaps").read_text())):
        pytest.skip("this system does not tell what is shared")
    child = os.fork()
    if child == 0:
        before = huge_nbytes(address)
        dnnl.use_huge_pages([(numbers.data_ptr(), numbers.nbytes)])
        os._exit(int(huge_nbytes(address) != before))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads /proc")
def test_of_an_arena_the_last_page_is_huge_if_most_of_it_is_used():
    for used, huge in ((5 << 20) - 64, 4 << 20), ((5 << 20) + 64, 6 << 20):
        memory = huge_bytes(used)
        found = huge_nbytes(memory.data_ptr())
        if found == 0:
            pytest.skip("this system has no huge pages to give")
        assert found == huge
