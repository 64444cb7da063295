"""Ownership of native handles: each has one owner, is destroyed exactly once and never used afterwards.

Owns the lifetime of handles; must not know the purpose of any handle.
"""

from __future__ import annotations

import atexit
import gc
from collections import Counter
from collections.abc import Callable
from ctypes import c_void_p
from functools import partial
from operator import attrgetter, length_hint
from types import TracebackType
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

from fmtprop.errors import HandleError

P = TypeVar("P", bound=c_void_p)
S = TypeVar("S", bound="Handle[Any]")


def live_handles() -> dict[str, int]:
    """Count the native handles that this process owns, by kind.

    Returns
    -------
    dict
        Kind, such as ``"memory"`` or ``"primitive"`` -> number alive; kinds without any are absent.
    """
    owners = (thing for thing in gc.get_objects() if issubclass(type(thing), Handle))
    return dict(Counter(owner.handle_kind for owner in owners if length_hint(getattr(owner, "_alive", ()))))


class Handle(Generic[P]):
    """Owner of one native handle.

    Parameters
    ----------
    pointer : c_void_p or None
        The handle, as created by the C function; None for an owner that gets it later.
    destroy : callable
        The C function that destroys it.

    Notes
    -----
    Destroying a oneDNN handle twice aborts the process, hence the single owner. ``close()`` may be called any number
    of times, from any thread; a later use of the handle raises `HandleError`. Objects can be used in ``with``.
    """

    __slots__ = ("__weakref__", "_alive", "_destroy", "_pointers", "_release")

    handle_kind: ClassVar[str] = "handle"

    def __init__(self, pointer: P | None, destroy: Callable[[P], int]) -> None:
        self._destroy = destroy
        self._hold(() if pointer is None else (pointer,))

    def _own(self, pointer: P) -> None:
        """Become the owner of a handle; a previous handle must have been closed."""
        self._hold((pointer,))

    def _hold(self, pointers: tuple[P, ...]) -> None:
        self._pointers = pointers
        # An iterator is the ownership: it gives its pointer once, whether threads or finalizers of one cycle ask.
        self._alive = iter(pointers)
        self._release = partial(next, map(self._destroy, self._alive), None)

    @property
    def handle(self) -> P:
        """The native pointer.

        Raises
        ------
        HandleError
            If this object was closed.
        """
        if self.closed:
            raise HandleError(f"{self.handle_kind} handle used after close(): create a new {type(self).__name__}")
        return self._pointers[0]

    @property
    def closed(self) -> bool:
        """Whether the native object is gone."""
        return not length_hint(self._alive)

    def close(self) -> None:
        """Destroy the native object now, if it is still alive."""
        self._release()

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled: a copy would be a second owner, or an owner in a process without the object.

        Raises
        ------
        HandleError
            Always.
        """
        raise HandleError(
            f"a {self.handle_kind} handle belongs to one owner in one process and can be neither copied nor pickled. "
            "A graph with formats holds such handles: copy or pickle the imported one, and compile it again"
        )

    def __enter__(self: S) -> S:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    #: The finalizer runs no Python code: Ctrl-C there would be printed, and lost, for a finalizer can raise nothing.
    #: Python asks the class for it, gets the attribute of the object, and calls that.
    __del__ = property(attrgetter("_release"))


# At interpreter shutdown the library's static objects may be gone: the operating system gets handles that are alive.
atexit.register(delattr, Handle, "__del__")
