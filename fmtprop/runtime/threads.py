"""The number of threads that the caller's thread runs with: torch's, which becomes oneDNN's too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch

from fmtprop import dnnl
from fmtprop.errors import LoadError


def current_threads() -> int:
    """Return the number of threads that oneDNN uses in the calling thread, after making it torch's number."""
    wanted = torch.get_num_threads()  # a thread that is new to torch takes over the number set for the process
    if torch_governs():
        return wanted
    library = dnnl.lib()
    library.set_threads(wanted)
    return library.threads


@contextmanager
def running_with(threads: int) -> Iterator[None]:
    """Let the calling thread, and no other, run with a number of threads."""
    before = current_threads()
    try:
        set_threads: Callable[[int], None] = dnnl.lib().set_threads
    except LoadError:  # PyTorch's operators run all of it
        set_threads = torch.set_num_threads
    set_threads(threads)
    try:
        yield
    finally:
        set_threads(before)


def on_cpu() -> AbstractContextManager[object]:
    """Return a context in which new tensors are on the CPU, for any default device of the caller."""
    # the context slows down every call of torch by 10 us, so it is entered only if it changes something
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


@cache
def torch_governs() -> bool:
    """Whether torch and oneDNN share one OpenMP runtime, so that a number set for one is the other's."""
    before = torch.get_num_threads()
    try:
        library = dnnl.lib()
    except LoadError:
        return True
    if library.threads != before:
        return False
    library.set_threads(before + 1)
    follows = torch.get_num_threads() == before + 1 == library.threads
    library.set_threads(before)
    return follows
