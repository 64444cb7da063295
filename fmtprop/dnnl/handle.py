"""Ownership of native handles: each has one owner, is destroyed exactly once and never used afterwards.

Owns the lifetime of handles; must not know the purpose of any handle.
"""

from __future__ import annotations

import atexit
import itertools
from collections import defaultdict
from collections.abc import Callable
from ctypes import c_void_p
from functools import partial
from operator import attrgetter
from types import TracebackType
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

from fmtprop.errors import HandleError

P = TypeVar("P", bound=c_void_p)
S = TypeVar("S", bound="Handle[Any]")

# Kind -> key -> pointer of every living handle. A key here *is* the ownership: `dict.pop` is atomic, so if two threads
# (or a thread and the garbage collector) close one handle, exactly one of them destroys it.
_ALIVE: defaultdict[str, dict[int, Any]] = defaultdict(dict)
_KEYS = itertools.count()
#: key of an owner without a handle
_NOTHING = -1


def live_handles() -> dict[str, int]:
    """Count the native handles that this process owns, by kind.

    Result: kind, such as ``"memory"`` or ``"primitive"`` -> number alive; kinds without any are absent.
    """
    return {kind: len(alive) for kind, alive in list(_ALIVE.items()) if alive}


class Handle(Generic[P]):
    """Owner of one native handle.

    `pointer`: the handle, as created by the C function; None for an owner that gets it later.

    Destroying a oneDNN handle twice aborts the process, hence the single owner. ``close()`` may be called any number
    of times, from any thread; a later use of the handle raises `HandleError`. Objects can be used in ``with``.
    """

    __slots__ = ("__weakref__", "_alive", "_destroy", "_key", "_release")

    handle_kind: ClassVar[str] = "handle"

    def __init__(self, pointer: P | None, destroy: Callable[[P], int]) -> None:
        self._destroy = destroy
        self._alive: dict[int, P] = _ALIVE[self.handle_kind]
        self._release: Callable[[], object]
        if pointer is None:
            self._key, self._release = _NOTHING, int  # which does nothing
        else:
            self._own(pointer)

    def _own(self, pointer: P) -> None:
        """Become the owner of a handle; a previous handle must have been closed."""
        self._key = key = next(_KEYS)
        self._alive[key] = pointer
        # takes the pointer from the living ones and destroys it, once, without Python code
        self._release = partial(next, map(self._destroy, map(self._alive.pop, (key,))), None)

    @property
    def handle(self) -> P:
        """The native pointer."""
        try:
            return self._alive[self._key]
        except KeyError:
            raise HandleError(
                f"{self.handle_kind} handle used after close(): create a new {type(self).__name__}"
            ) from None

    @property
    def closed(self) -> bool:
        """Whether the native object is gone."""
        return self._key not in self._alive

    def close(self) -> None:
        """Destroy the native object now, if it is still alive."""
        self._release()

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled: a copy would be a second owner, maybe in a process without the object."""
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
