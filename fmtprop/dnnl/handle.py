"""Ownership of native handles: each has one owner, is destroyed exactly once and never used afterwards.

Owns the lifetime of handles; must not know the purpose of any handle.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable
from ctypes import c_void_p
from types import TracebackType
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

from fmtprop.errors import HandleError

P = TypeVar("P", bound=c_void_p)
S = TypeVar("S", bound="Handle[Any]")

# Key -> kind of every living handle. A key here *is* the ownership: `dict.pop` is atomic, so if two threads (or a
# thread and the garbage collector) close one handle, exactly one of them destroys it.
_ALIVE: dict[int, str] = {}
_KEYS = itertools.count()
#: key of an owner without a handle
_NOTHING = -1


def live_handles() -> dict[str, int]:
    """Count the native handles that this process owns, by kind.

    Returns
    -------
    dict
        Kind, such as ``"memory"`` or ``"primitive"`` -> number alive; kinds without any are absent.
    """
    return dict(Counter(list(_ALIVE.values())))


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

    __slots__ = ("__weakref__", "_destroy", "_key", "_pointer")

    handle_kind: ClassVar[str] = "handle"

    def __init__(self, pointer: P | None, destroy: Callable[[P], int]) -> None:
        self._destroy = destroy
        if pointer is None:
            self._key = _NOTHING
        else:
            self._own(pointer)

    def _own(self, pointer: P) -> None:
        """Become the owner of a handle; a previous handle must have been closed."""
        self._pointer = pointer
        self._key = next(_KEYS)
        _ALIVE[self._key] = self.handle_kind

    @property
    def handle(self) -> P:
        """The native pointer.

        Raises
        ------
        HandleError
            If this object was closed.
        """
        if self._key not in _ALIVE:
            raise HandleError(f"{self.handle_kind} handle used after close(): create a new {type(self).__name__}")
        return self._pointer

    @property
    def closed(self) -> bool:
        """Whether the native object is gone."""
        return self._key not in _ALIVE

    def close(self) -> None:
        """Destroy the native object now, if it is still alive."""
        if _ALIVE.pop(self._key, None) is not None:
            self._destroy(self._pointer)

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

    # Defaults bind the names early: at interpreter shutdown the module's globals and the library's static objects may
    # be gone. A handle that is alive then is left to the operating system.
    def __del__(
        self,
        _finalizing: Callable[[], bool] = sys.is_finalizing,
        _alive: dict[int, str] = _ALIVE,
    ) -> None:
        if not _finalizing() and hasattr(self, "_key") and _alive.pop(self._key, None) is not None:
            self._destroy(self._pointer)
