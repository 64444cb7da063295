"""Control of Python's cycle collector, which must not run while many objects are made or time is measured.

A compilation makes a million small objects, and PyTorch has made a million before. Hardly any of them are cyclic
garbage, but the collector's passes would take a tenth of the compilation.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: whether the program had frozen objects once; to count them takes as long as a pass over them
_has_frozen = False


@contextmanager
def paused() -> Iterator[None]:
    """Keep the collector from starting by itself; afterwards it is on or off as before.

    At the end, it looks at the objects that were made since. Otherwise it would look at once at all objects of the
    process, of which PyTorch's export alone makes half a million.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    global _has_frozen
    _has_frozen = _has_frozen or gc.get_freeze_count() > 0
    aside = not _has_frozen  # the caller's own frozen objects stay frozen
    if aside:
        gc.freeze()
    try:
        yield
    finally:
        if aside:
            gc.collect()
            gc.unfreeze()
        gc.enable()


def collect_young() -> None:
    """Free the cyclic garbage among young objects: while the collector is paused, all objects made since the pause."""
    gc.collect(1)
