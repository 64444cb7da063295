"""Keys: a hash of everything that a record depends on.

Must not know the meaning of records.
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
    """Return the key of a problem on this machine; it includes library, instruction set, CPU and number of threads.

    >>> key_of({"op": "a"}) == key_of({"op": "a"}), key_of({"op": "a"}) == key_of({"op": "b"})
    (True, False)
    """
    try:
        library = dnnl.lib()
        where = [*library.version, library.hash, library.runtime, library.isa, _cpu(), library.threads]
    except LoadError:  # only PyTorch's operators run here
        import torch  # imported only here: fmtprop.dnnl works without torch

        where = [torch.__version__, torch.backends.cpu.get_cpu_capability(), _cpu(), torch.get_num_threads()]
    text = json.dumps([where, problem], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@lru_cache(maxsize=1)
def _cpu() -> str:
    """Return the processor's model name and the processors that this machine has."""
    return f"{cpu_model()} x{os.cpu_count()}"
