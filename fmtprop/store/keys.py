"""Keys: everything that a record depends on, as one hash.

Must not know what is recorded.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from functools import lru_cache

from fmtprop import dnnl
from fmtprop.errors import LoadError
from fmtprop.system.machine import cpu_model


def key_of(problem: Mapping[str, object]) -> str:
    """Return the key of a problem on this machine as it is now: library, instruction set, CPU and threads are in it.

    Parameters
    ----------
    problem : mapping of str to object
        Plain JSON data: everything else that the record depends on.

    Examples
    --------
    >>> key_of({"op": "a"}) == key_of({"op": "a"}), key_of({"op": "a"}) == key_of({"op": "b"})
    (True, False)
    """
    try:
        library = dnnl.lib()
        where = [*library.version, library.hash, library.runtime, library.isa, _cpu(), library.threads]
    except LoadError:  # PyTorch's operators alone run here
        import torch  # the library's room does without it

        where = [torch.__version__, torch.backends.cpu.get_cpu_capability(), _cpu(), torch.get_num_threads()]
    text = json.dumps([where, problem], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@lru_cache(maxsize=1)
def _cpu() -> str:
    """Return the processor's model name and the processors that this machine has."""
    return f"{cpu_model()} x{os.cpu_count()}"
