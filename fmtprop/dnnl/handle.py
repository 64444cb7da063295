"""Ownership of native handles: one owner each, destroyed exactly once, never used after that.

Knows how a handle lives and dies; must not know what any particular handle is for.
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

# Key -> kind of every handle that is alive. Presence here *is* ownership: `dict.pop` is atomic, so of two
# threads (or a thread and the garbage collector) that close one handle, exactly one destroys it.
_ALIVE: dict[int, str] = {}
_KEYS = itertools.count()
#: the key of an owner that has no handle yet
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
        The handle, as the C function created it; None for an owner that has none yet.
    destroy : callable
        The C function that destroys it.

    Notes
    -----
    Destroying a oneDNN handle twice aborts the process, hence the single owner. ``close()`` may be called any
    number of times, from any thread; using the handle afterwards raises `HandleError`. Objects work in ``with``.
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
        """Become the owner of a handle; of a second one only after the first was closed."""
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
        """Refuse to be copied or pickled: there would be two owners, or one in a process without the object.

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

    # Bound early: at interpreter shutdown the module's globals may be gone, and so may the library's own
    # static objects, so a handle that is still alive then is left to the operating system.
    def __del__(
        self,
        _finalizing: Callable[[], bool] = sys.is_finalizing,
        _alive: dict[int, str] = _ALIVE,
    ) -> None:
        if not _finalizing() and hasattr(self, "_key") and _alive.pop(self._key, None) is not None:
            self._destroy(self._pointer)
