"""The CPU engine and its streams."""

from __future__ import annotations

from ctypes import byref
from typing import ClassVar

from fmtprop.dnnl import _abi
from fmtprop.dnnl.handle import Handle
from fmtprop.dnnl.library import lib, raise_status
from fmtprop.system.locks import ProcessLock

_CPU = _abi.ENUMS["dnnl_engine_kind_t"]["cpu"]
_IN_ORDER = _abi.ENUMS["dnnl_stream_flags_t"]["stream_in_order"]


class Engine(Handle[_abi.dnnl_engine_t]):
    """A oneDNN engine; use `Engine.cpu`, the one that the whole process shares.

    Raises LoadError if no library can be loaded, and DnnlError if oneDNN offers no CPU engine.
    """

    handle_kind = "engine"
    __slots__ = ()
    _shared: ClassVar[Engine | None] = None
    _lock: ClassVar[ProcessLock] = ProcessLock()

    def __init__(self) -> None:
        pointer = _abi.dnnl_engine_t()
        raise_status("dnnl_engine_create", lib().engine_create(byref(pointer), _CPU, 0), "CPU engine 0")
        super().__init__(pointer, lib().engine_destroy)

    @classmethod
    def cpu(cls) -> Engine:
        """Return the process-wide CPU engine."""
        shared = cls._shared
        if shared is not None and not shared.closed:
            return shared
        with cls._lock.current:
            if cls._shared is None or cls._shared.closed:
                cls._shared = Engine()
            return cls._shared


class Stream(Handle[_abi.dnnl_stream_t]):
    """An in-order stream of an engine. One per thread that executes.

    `engine`: default: the process-wide CPU engine.
    """

    handle_kind = "stream"
    __slots__ = ("engine",)

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine if engine is not None else Engine.cpu()
        pointer = _abi.dnnl_stream_t()
        status = lib().stream_create(byref(pointer), self.engine.handle, _IN_ORDER)
        raise_status("dnnl_stream_create", status)
        super().__init__(pointer, lib().stream_destroy)

    def wait(self) -> None:
        """Wait until all submitted primitives have finished; only a SYCL build runs asynchronously.

        Raises DnnlError if a primitive failed.
        """
        raise_status("dnnl_stream_wait", lib().stream_wait(self.handle))
