"""Python's cycle collector, kept out of the way of what makes many objects or is timed.

A compilation makes a million small objects, of which hardly any are cyclic garbage, in a process in which PyTorch has
made a million before: the collector's rounds would be a tenth of its time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collect_young", "paused"]


@contextmanager
def paused() -> Iterator[None]:
    """Keep the collector from starting by itself; a program that has switched it off finds it so."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


def collect_young() -> None:
    """Free the cyclic garbage among what was made lately: while the collector is paused, since then."""
    gc.collect(1)
