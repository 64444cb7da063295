"""Memory objects and prebuilt argument lists.

Owns the pair of pointer and descriptor; buffers belong to the caller. Of PyTorch tensors, only methods are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, byref, c_int, c_void_p
from typing import TYPE_CHECKING

from fmtprop.dnnl import _abi
from fmtprop.dnnl._abi import Arg, dnnl_exec_arg_t
from fmtprop.dnnl.desc import NativeDesc
from fmtprop.dnnl.engine import Engine
from fmtprop.dnnl.handle import Handle
from fmtprop.dnnl.library import lib, raise_status
from fmtprop.errors import InputError

if TYPE_CHECKING:
    import torch


class Memory(Handle[_abi.dnnl_memory_t]):
    """A ``dnnl_memory_t`` over a buffer of the caller.

    `pointer`: address of at least ``desc.nbytes`` bytes, which must outlive every execution; None to set it later.
    `owner`: an object that is kept alive with this one, such as the pointer's tensor. Raises DnnlError if oneDNN
    refuses the descriptor.
    """

    handle_kind = "memory"
    __slots__ = ("desc", "engine", "owner")

    def __init__(self, engine: Engine, desc: NativeDesc, pointer: int | None, owner: object = None) -> None:
        out = _abi.dnnl_memory_t()
        status = lib().memory_create(byref(out), desc.handle, engine.handle, pointer)
        if status:  # the message would cost more than the call
            raise_status("dnnl_memory_create", status, f"{desc}; a memory needs a concrete format, not `any`")
        super().__init__(out, lib().memory_destroy)
        self.engine = engine
        self.desc = desc
        self.owner = owner

    def set_data_handle(self, pointer: int | None) -> None:
        """Point at another buffer of at least ``desc.nbytes`` bytes.

        Raises DnnlError if oneDNN refuses.
        """
        status = lib().memory_set_data_handle(self.handle, pointer)
        if status:  # the message would cost more than the call
            raise_status("dnnl_memory_set_data_handle", status, str(self.desc))

    @property
    def pointer(self) -> int | None:
        """Address of the buffer; None if not set."""
        out = c_void_p()
        raise_status("dnnl_memory_get_data_handle", lib().memory_get_data_handle(self.handle, byref(out)))
        return out.value


def memory_of(tensor: torch.Tensor, desc: NativeDesc) -> Memory:
    """Return a memory over a tensor's data, without a copy.

    `desc`: the layout of the bytes from ``tensor.data_ptr()`` on.

    >>> import torch
    >>> from fmtprop import dnnl
    >>> from fmtprop.layout import MemoryDesc
    >>> x = torch.ones(2, 3)
    >>> memory = dnnl.memory_of(x, dnnl.NativeDesc.from_desc(MemoryDesc((2, 3), "f32", tag="ab")))
    >>> memory.pointer == x.data_ptr()
    True
    """
    available = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    if desc.nbytes > available:
        raise InputError(
            f"tensor has {available} bytes from its first element on, but desc {desc} needs {desc.nbytes}; "
            "allocate as many bytes as the desc's nbytes"
        )
    return Memory(Engine.cpu(), desc, tensor.data_ptr(), tensor)


class ExecArgs:
    """A prebuilt C array of ``dnnl_exec_arg_t``.

    `arguments`: argument number (`Arg`, or-ed for post-ops) and its memory. `count`: number of entries, ready for the
    hot loop.
    """

    __slots__ = ("array", "count", "memories")

    def __init__(self, arguments: Sequence[tuple[int | Arg, Memory]]) -> None:
        self.memories = tuple(memory for _, memory in arguments)
        self.array: Array[dnnl_exec_arg_t] = (dnnl_exec_arg_t * len(arguments))(
            *(dnnl_exec_arg_t(int(arg), memory.handle) for arg, memory in arguments)
        )
        self.count = c_int(len(arguments))
