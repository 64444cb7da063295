"""oneDNN's primitives as implementations, alone or followed by one of the project's kernels for the last post-op."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from fmtprop import dnnl
from fmtprop.errors import DnnlError
from fmtprop.ir import Node, opdef
from fmtprop.ir.tensors import tensor_type
from fmtprop.jit import Call, Kernel, Work, on_one_thread
from fmtprop.layout import MemoryDesc
from fmtprop.targets.arguments import arguments, scale_arguments, start_of
from fmtprop.targets.bound import SCRATCHPAD, Bound, MovableMemory, OwnStream, Place
from fmtprop.targets.executable import Executable, Implementation, Provider
from fmtprop.targets.memory import aligned_bytes


@dataclass(frozen=True, eq=False)
class PrimitiveImplementation(Implementation):
    """A primitive descriptor as an implementation."""

    pd: dnnl.PrimitiveDesc
    offered_by: Callable[[], Provider]
    #: Kernel that runs on the result afterwards, for the node's last post-op
    after: Kernel | None = None
    #: whether one thread runs it, with any number of threads in the plan (:func:`one_thread`)
    is_alone: bool = False

    takes_any_numbers = True
    overwrites = True

    @property
    def is_for_threads(self) -> bool:  # type: ignore[override]  # the same, computed
        """Whether it was offered for one number of threads."""
        return not self.is_alone

    @property
    def identity(self) -> Mapping[str, str]:  # type: ignore[override]  # the same, computed
        """What the library's version and the formats do not identify.

        That is the kernel's code, a number of threads of its own, and strides without effect on a format.
        """
        with self._threads():
            parts = {"threads": "1" if self.is_alone else "", "strides": self.pd.own_strides}
        if self.after is not None:
            parts["after"] = self.after.fingerprint
        return {name: part for name, part in parts.items() if part}

    @property
    def scratchpad_nbytes(self) -> int:
        """Bytes of its scratchpad."""
        with self._threads():
            return self.pd.scratchpad_nbytes

    @property
    def repro(self) -> str:
        """A benchdnn command line."""
        return self.pd.repro

    def target(self) -> Provider:
        """Return a new target of the kind that offered it."""
        return self.offered_by()

    def build(self, threads: int) -> Executable:
        """Return the compiled primitive; `threads` is the number that it was offered for, unless it runs alone."""
        with self._threads():
            return _CompiledPrimitive(dnnl.Primitive(self.pd), self.after, threads if self.is_alone else 1)

    def needs_check(self, node: Node) -> bool:
        """Return whether a check may choose the numbers of all operands."""
        return opdef(node.op).numbers.checkable(node.attrs)

    def residual(self, node: Node) -> str | None:
        """Return the operand that its sum post-op adds to."""
        return node.residual

    def _threads(self) -> AbstractContextManager[None]:
        """Return a context with the number of threads that the primitive has."""
        return one_thread() if self.is_alone else nullcontext()


@contextmanager
def one_thread() -> Iterator[None]:
    """Let the calling thread make primitives for one thread.

    oneDNN starts all threads for the smallest tensor, and one thread has done the work before the others wake up.
    """
    library = dnnl.lib()
    before = library.threads
    library.set_threads(1)
    try:
        yield
    finally:
        library.set_threads(before)


class _CompiledPrimitive(Executable):
    """A primitive; `restored` is the number of threads after its run on one thread, 1 if it has all threads."""

    def __init__(self, primitive: dnnl.Primitive, after: Kernel | None, restored: int) -> None:
        self._primitive, self._after, self._restored = primitive, after, restored
        #: formats of operands -> the arguments; steps with this primitive have the same attributes and post-ops
        self._arguments: dict[tuple[object, ...], list[tuple[str, int, dnnl.NativeDesc]]] = {}

    def bind(self, node: Node, places: Mapping[str, Place], stream: OwnStream) -> Bound:
        arguments_ = [
            (number, md, places[name].memory, start_of(places[name].desc, md))
            for name, number, md in self._arguments_of(node)
        ]
        for number, numbers in scale_arguments(node):
            md = dnnl.NativeDesc.from_desc(MemoryDesc(numbers.shape, tensor_type(numbers).dtype))
            arguments_.append((number, md, MovableMemory(numbers), 0))
        scratchpad = places[SCRATCHPAD].memory if SCRATCHPAD in places else None
        work = None
        if self._after is not None:
            dst = places["dst"]  # it begins with the result: in a concat in place, somewhere inside the memory
            work = Work(self._after, dst.desc.at_start().nbytes)
            dst.memory.follow(work.set_data_handle, dst.desc.offset0 * dst.desc.dtype.nbytes)
        return bind_primitive(
            self._primitive, arguments_, scratchpad, stream, work, node.label, restored=self._restored
        )

    def _arguments_of(self, node: Node) -> list[tuple[str, int, dnnl.NativeDesc]]:
        key = tuple(node.choice.operands.items()) if node.choice is not None else ()
        if key not in self._arguments:
            self._arguments[key] = arguments(node, self._primitive.desc)
        return self._arguments[key]

    def lay_out(self, node: Node, name: str, tensor: torch.Tensor) -> torch.Tensor:
        mds = {operand: md for operand, _, md in self._arguments_of(node)}
        return laid_out(tensor, mds[name])

    def close(self) -> None:
        self._primitive.close()


def bind_primitive(
    primitive: dnnl.Primitive,
    arguments: Sequence[tuple[int, dnnl.NativeDesc, MovableMemory, int]],
    scratchpad: MovableMemory | None,
    stream: OwnStream,
    after: Work | None = None,
    label: str = "",
    *,
    restored: int = 1,
) -> Bound:
    """Return a primitive with its arguments, ready for execution.

    `arguments`: number, descriptor, memory, and offset from the memory's start in bytes. `restored`: number of threads
    after the run, if the primitive was made for one thread and the plan has more; else 1.
    """
    pd = primitive.desc
    room = pd.query_md("scratchpad")
    if room is not None and room.nbytes and scratchpad is not None:
        arguments = [*arguments, (int(dnnl.Arg.SCRATCHPAD), room, scratchpad, 0)]
    given = dnnl.ExecArgs([(number, stream.memory(memory, md, start)) for number, md, memory, start in arguments])
    calls: list[Call] = [(dnnl.hot_execute, primitive.handle, stream.native.handle, given.count, given.array)]
    alone = on_one_thread(calls, restored) if restored > 1 else None
    if alone is not None:  # one call, so that Ctrl-C finds the caller's number of threads
        calls = [alone.call]
    if after is not None:
        calls.append(after.call)

    def failure(status: int) -> DnnlError:
        if alone is not None:
            dnnl.lib().set_threads(restored)
        details = f"{label} with {pd.impl}".removeprefix(" with ")
        return DnnlError("dnnl_primitive_execute", dnnl.status_name(status), details, pd.repro)

    return Bound(
        calls,
        keep=[*(one[2].tensor for one in arguments if one[2].is_fixed), given, alone, after],
        failure=failure,
    )


def laid_out(tensor: torch.Tensor, md: dnnl.NativeDesc) -> torch.Tensor:
    """Return numbers as flat bytes in any format that oneDNN knows; oneDNN packs them."""
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
