"""oneDNN's primitives as implementations, alone or followed by one of the project's kernels for the last post-op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fmtprop import dnnl
from fmtprop.errors import DnnlError
from fmtprop.ir.node import Node
from fmtprop.ir.op import opdef
from fmtprop.ir.tensors import tensor_type
from fmtprop.jit import Call, Kernel, Work
from fmtprop.layout import MemoryDesc
from fmtprop.targets.arguments import arguments, start_of
from fmtprop.targets.bound import SCRATCHPAD, Bound, Memory, Place, Stream
from fmtprop.targets.executable import Executable, Implementation, Provider
from fmtprop.targets.memory import aligned_bytes

__all__ = ["PrimitiveImplementation", "bind_primitive"]


@dataclass(frozen=True, eq=False)
class PrimitiveImplementation(Implementation):
    """A primitive descriptor as an implementation.

    Parameters
    ----------
    pd : PrimitiveDesc
        Descriptor of the primitive.
    offered_by : callable
        Makes the target that offered it.
    after : Kernel, optional
        Kernel that runs on the result afterwards, for the node's last post-op.
    """

    pd: dnnl.PrimitiveDesc
    offered_by: Callable[[], Provider]
    after: Kernel | None = None

    takes_any_numbers = True
    is_for_threads = True
    overwrites = True

    @property
    def identity(self) -> Mapping[str, str]:  # type: ignore[override]  # the same, computed
        """The kernel's code, which the library's version does not identify."""
        return {} if self.after is None else {"after": self.after.fingerprint}

    @property
    def scratchpad_nbytes(self) -> int:
        """Bytes of its scratchpad."""
        return self.pd.scratchpad_nbytes

    @property
    def repro(self) -> str:
        """A benchdnn command line."""
        return self.pd.repro

    def target(self) -> Provider:
        """Return a new target of the kind that offered it."""
        return self.offered_by()

    def build(self, threads: int) -> Executable:
        """Return the compiled primitive; `threads` is the number that it was offered for."""
        return _CompiledPrimitive(dnnl.Primitive(self.pd), self.after)

    def needs_check(self, node: Node) -> bool:
        """Return whether a check may choose the numbers of all operands."""
        return opdef(node.op).checkable(node.attrs)

    def residual(self, node: Node) -> str | None:
        """Return the operand that its sum post-op adds to."""
        return node.residual


class _CompiledPrimitive(Executable):
    def __init__(self, primitive: dnnl.Primitive, after: Kernel | None) -> None:
        self._primitive, self._after = primitive, after

    def bind(self, node: Node, places: Mapping[str, Place], stream: Stream) -> Bound:
        arguments_ = [
            (number, md, places[name].memory, start_of(places[name].desc, md))
            for name, number, md in arguments(node, self._primitive.desc)
        ]
        scratchpad = places[SCRATCHPAD].memory if SCRATCHPAD in places else None
        work = None
        if self._after is not None:
            dst = places["dst"]  # it begins with the result: in a concat in place, somewhere inside the memory
            work = Work(self._after, dst.desc.at_start().nbytes)
            dst.memory.follow(work.set_data_handle, dst.desc.offset0 * dst.desc.dtype.nbytes)
        return bind_primitive(self._primitive, arguments_, scratchpad, stream, work, node.label)

    def lay_out(self, node: Node, name: str, tensor: torch.Tensor) -> torch.Tensor:
        mds = {operand: md for operand, _, md in arguments(node, self._primitive.desc)}
        return laid_out(tensor, mds[name])

    def close(self) -> None:
        self._primitive.close()


def bind_primitive(
    primitive: dnnl.Primitive,
    arguments: Sequence[tuple[int, dnnl.NativeDesc, Memory, int]],
    scratchpad: Memory | None,
    stream: Stream,
    after: Work | None = None,
    label: str = "",
) -> Bound:
    """Return a primitive with its arguments, ready for execution.

    Parameters
    ----------
    primitive : Primitive
        The primitive.
    arguments : sequence of (int, NativeDesc, Memory, int)
        Number, descriptor, memory, and offset from the memory's start in bytes.
    scratchpad : Memory, optional
        At least as large as the primitive needs.
    stream : Stream
        Stream of the calls.
    after : Work, optional
        Kernel that runs afterwards.
    label : str
        Name of the computation in messages.
    """
    pd, engine, bound = primitive.desc, dnnl.Engine.cpu(), []
    room = pd.query_md("scratchpad")
    if room is not None and room.nbytes and scratchpad is not None:
        arguments = [*arguments, (int(dnnl.Arg.SCRATCHPAD), room, scratchpad, 0)]
    for number, md, memory, start in arguments:
        native = dnnl.Memory(engine, md, None)
        memory.follow(native.set_data_handle, start)
        bound.append((number, native))
    given = dnnl.ExecArgs(bound)
    calls: list[Call] = [(dnnl.hot_execute, primitive.handle, stream.native.handle, given.count, given.array)]
    if after is not None:
        calls.append(after.call)

    def failure(status: int) -> DnnlError:
        details = f"{label} with {pd.impl}".removeprefix(" with ")
        return DnnlError("dnnl_primitive_execute", dnnl.status_name(status), details, pd.repro)

    return Bound(calls, keep=[*(native for _, native in bound), given, after], failure=failure)


def laid_out(tensor: torch.Tensor, md: dnnl.NativeDesc) -> torch.Tensor:
    """Return numbers as flat bytes in any format that oneDNN knows; oneDNN packs them.

    Parameters
    ----------
    tensor : torch.Tensor
        Dense, row-major.
    md : NativeDesc
        The format.
    """
    native = dnnl.NativeDesc.from_desc(MemoryDesc(tensor.shape, tensor_type(tensor).dtype))
    result, engine = aligned_bytes(md.nbytes), dnnl.Engine.cpu()
    with dnnl.create(dnnl.Reorder(src=native, dst=md)) as pd:
        memories: dict[int | dnnl.Arg, dnnl.Memory] = {
            dnnl.Arg.FROM: dnnl.Memory(engine, native, tensor.data_ptr(), tensor),
            dnnl.Arg.TO: dnnl.Memory(engine, md, result.data_ptr(), result),
        }
        if (room := pd.query_md("scratchpad")) is not None and room.nbytes:
            scratchpad = aligned_bytes(room.nbytes)
            memories[dnnl.Arg.SCRATCHPAD] = dnnl.Memory(engine, room, scratchpad.data_ptr(), scratchpad)
        dnnl.Primitive(pd).execute(dnnl.Stream(engine), memories)
    return result
