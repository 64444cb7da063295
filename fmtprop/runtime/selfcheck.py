"""A plan checks itself: each distinct primitive runs once on small numbers and is compared with its reference.

Those too that ran while the plan was made: reorders that packed an operand for a step lay out its numbers, and are so
checked with it; what else computed with constants is checked by itself. All other operands are laid out, and results
read, by the project's own numpy algebra, so that the check does not lean on the library it checks. What passed is
remembered on disk by problem, library, CPU and threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from fmtprop import dnnl
from fmtprop.errors import PlanError
from fmtprop.ir.node import Choice, Node
from fmtprop.ir.tensors import tensor_type
from fmtprop.layout import DataType, MemoryDesc, pack, unpack
from fmtprop.runtime.agreement import TOLERANCE, error_of_numbers, small_numbers
from fmtprop.runtime.calls import call_reference
from fmtprop.runtime.convolve import convolve
from fmtprop.runtime.cut_down import cut_down
from fmtprop.runtime.host_check import check_call, is_run_by_pytorch, needs_check
from fmtprop.runtime.plan import Step
from fmtprop.store import Store, key_of
from fmtprop.targets import OneDnnTarget
from fmtprop.targets.arguments import arguments, start_of
from fmtprop.targets.kernels import JIT
from fmtprop.targets.memory import ALIGNMENT, aligned_bytes
from fmtprop.targets.reference import REFERENCE
from fmtprop.targets.tail import own_code, tail_of
from fmtprop.tuning.problem import persistent_text

#: what PyTorch would run by a oneDNN of its own
_INDEPENDENT = {"convolution": convolve}

#: how to see again that PyTorch misreads a memory format, or its operator what it is given
_BY_PYTORCH = "the operator on the same numbers in these formats, and the op's reference on them row-major"

#: bytes that checks share; what is beyond them has memory of its own
_ROOM = 48 << 20


@dataclass(frozen=True)
class Mismatch:
    """A primitive that gave a wrong answer.

    Parameters
    ----------
    node : Node
        The node whose primitive it is.
    error : float
        Largest error relative to the largest magnitude of the reference.
    repro : str
        benchdnn command line, or what to compare.
    reader : Node, optional
        The node for which it packed an operand: where nobody else can do that, another has to run there.
    """

    node: Node
    error: float
    repro: str
    reader: Node | None = None

    def __str__(self) -> str:
        impl = self.node.choice.impl if self.node.choice is not None else "?"
        return f"{self.node.label}: {impl} is off by {self.error:.1e} relative; reproduce with: {self.repro}"


def check_steps(steps: Iterable[Step], store: Store, packed: Iterable[Node] = ()) -> list[Mismatch]:
    """Check every distinct primitive, and every kernel, that is not known to be right.

    Parameters
    ----------
    steps : iterable of Step
        A plan's steps; what PyTorch runs by a reference on row-major tensors is right as it is.
    store : Store
        What passed before; extended.
    packed : iterable of Node
        Nodes that ran once, on constants. Those that packed an operand for a step are checked with the step; of the
        others, a result that only the library can read is passed over.

    Returns
    -------
    list of Mismatch
        The primitives that are wrong.
    """
    steps = [step for step in steps if step.primitive is not None or step.target == JIT or needs_check(step.node)]
    covered = {node.name for step in steps for node in step.packing.values()}
    # what packs for no step by itself: others read it, or make something else of it
    readable = [node for node in packed if _is_readable(node) or needs_check(node)]
    alone = [node for node in readable if node.name not in covered]
    work: dict[str, Callable[[], Mismatch | None]] = {}
    room = _Room()
    for step in steps:
        work.setdefault(_step_key(step), partial(_wrong_in, step, room))
    for node in alone:
        work.setdefault(primitive_key(node), partial(_wrong, node, room))
    found = {key: check() for key, check in work.items() if not store.has_passed(key)}
    store.add_passed(key for key, mismatch in found.items() if mismatch is None)
    return [mismatch for mismatch in found.values() if mismatch is not None]


def _wrong(node: Node, room: _Room) -> Mismatch | None:
    if is_run_by_pytorch(node):
        error, how = check_call(node), _BY_PYTORCH
    else:
        error, how = check_primitive(node, room=room), _choice(node).handle.repro
    return None if error is None else Mismatch(node, error, how)


def _wrong_in(step: Step, room: _Room) -> Mismatch | None:
    """Return what is wrong: the step's primitive, or one that packed an operand for it."""
    if is_run_by_pytorch(step.node):
        return _wrong(step.node, room)
    error = check_primitive(step.node, step.primitive, room, step.packing)
    if error is None:
        return None
    if step.packing and check_primitive(step.node, step.primitive, room) is None:
        packers = list(step.packing.values())
        packer = next((node for node in packers if _is_readable(node) and _wrong(node, room)), packers[0])
        return Mismatch(packer, error, _choice(packer).handle.repro, step.node)
    return Mismatch(step.node, error, _choice(step.node).handle.repro)


def _step_key(step: Step) -> str:
    packing = {name: primitive_key(node) for name, node in step.packing.items()}
    key = primitive_key(step.node)
    return key_of({"step": key, "packing": packing}) if packing else key


def _is_readable(node: Node) -> bool:
    return node.choice is not None and node.choice.target == "onednn" and node.descs[0].kind == "blocked"


def primitive_key(node: Node) -> str:
    """Return a hash of everything that the result of a node's primitive depends on."""
    choice = _choice(node)
    by = {"torch": torch.__version__, "as": "it runs"} if choice.target == REFERENCE else {}
    problem = {
        **by,
        "op": node.op,
        "attrs": node.attrs.to_json(),
        "post_ops": [(p.op, p.attrs.to_json(), p.operand) for p in node.post_ops],
        "impl": choice.impl,
        **own_code(choice),
        "operands": {name: persistent_text(desc) for name, desc in choice.operands.items()},
        "results": [persistent_text(desc) for desc in node.descs],
    }
    return key_of(problem)


class _Room:
    """Memory for one check after the other: on new pages, their arrival takes longer than anything else."""

    def __init__(self) -> None:
        self._block = aligned_bytes(_ROOM)
        self._next = 0
        #: asked for smaller primitives
        self.target = OneDnnTarget()

    def clear(self) -> None:
        """Let the next check have it all."""
        self._next = 0

    def take(self, nbytes: int, fill: int) -> torch.Tensor:
        """Return flat bytes of one value, aligned to 64 bytes."""
        start, self._next = self._next, self._next + -(-nbytes // ALIGNMENT) * ALIGNMENT
        taken = self._block[start : start + nbytes] if self._next <= _ROOM else aligned_bytes(nbytes)
        return taken.fill_(fill)


def check_primitive(
    node: Node,
    primitive: dnnl.Primitive | None = None,
    room: _Room | None = None,
    packing: Mapping[str, Node] | None = None,
) -> float | None:
    """Run a node's primitive on small numbers; return its relative error where it is too large, else None.

    A large node runs cut down to fewer rows or images, where the same implementation does it.

    Parameters
    ----------
    node : Node
        Formatted, of the oneDNN target or run by a kernel of our own.
    primitive : Primitive, optional
        What its choice has been compiled to.
    room : optional
        Memory of checks before.
    packing : mapping of str to Node, optional
        Reorders that are to lay out operands; others are laid out by the project's own algebra.
    """
    room = room or _Room()
    small = cut_down(node, room.target)
    if small is not None:
        node, primitive = small, None
    if _choice(node).target == JIT:
        got = _execute_kernel(node, room)
    else:
        got = _execute(node, primitive or dnnl.Primitive(_choice(node).handle), room, packing or {})
    # weights are large: what was laid out for the primitive is gone by now
    tensors = {name: small_numbers(node, name, desc) for name, desc in _choice(node).operands.items()}
    (expected, *_) = call_reference(node, tensors, _INDEPENDENT)
    error = error_of_numbers(got, expected)
    return error if error > TOLERANCE.get(node.descs[0].dtype, 0.0) else None


def _choice(node: Node) -> Choice:
    if node.choice is None:
        raise PlanError(f"{node.label} has no choice: assign formats before checking")
    return node.choice


def _execute(
    node: Node,
    primitive: dnnl.Primitive,
    room: _Room,
    packing: Mapping[str, Node],
) -> torch.Tensor:
    room.clear()
    natives = {name: md for name, _, md in arguments(node, primitive.desc)}
    flat = {}
    for name, desc in _choice(node).operands.items():
        if name in packing:
            dtype = _choice(packing[name]).operands["src"].dtype
            flat[name] = _packed_by(packing[name], small_numbers(node, name, desc, dtype), room)
        elif desc.kind == "blocked":
            flat[name] = _packed(small_numbers(node, name, desc), desc, room)
        else:
            flat[name] = _packed_by_library(small_numbers(node, name, desc), natives[name], room)
    flat["dst"] = room.take(node.descs[0].nbytes, 0x55)
    for post_op in node.post_ops:
        if post_op.op == "sum" and post_op.operand is not None:
            flat["dst"] = flat[post_op.operand]
    _run(node, primitive, flat, room)
    return _unpacked(flat["dst"], node.descs[0])


def _execute_kernel(node: Node, room: _Room) -> torch.Tensor:
    room.clear()
    choice, dst = _choice(node), node.descs[0].at_start()
    flat = {
        name: _packed(small_numbers(node, name, desc), desc.at_start(), room) for name, desc in choice.operands.items()
    }
    flat["dst"] = room.take(dst.nbytes, 0x55)
    work = choice.handle.work(dnnl.lib().threads)
    for name, pointer in work.pointers.items():
        pointer.set_data_handle(flat[name].data_ptr())
    work.run()
    return _unpacked(flat["dst"], dst)


def _run(node: Node, primitive: dnnl.Primitive, flat: Mapping[str, torch.Tensor], room: _Room) -> None:
    engine, pd = dnnl.Engine.cpu(), primitive.desc
    descs = {**_choice(node).operands, "dst": node.descs[0]}
    memories = {
        arg: dnnl.Memory(engine, md, flat[name].data_ptr() + start_of(descs[name], md))
        for name, arg, md in arguments(node, pd)
    }
    if pd.scratchpad_nbytes and (md := pd.query_md("scratchpad")) is not None:
        scratchpad = room.take(pd.scratchpad_nbytes, 0)
        memories[dnnl.Arg.SCRATCHPAD] = dnnl.Memory(engine, md, scratchpad.data_ptr(), scratchpad)
    primitive.execute(dnnl.Stream(engine), memories)
    if (work := tail_of(node, flat["dst"].data_ptr())) is not None:
        work.run()


def _packed_by(packer: Node, tensor: torch.Tensor, room: _Room) -> torch.Tensor:
    """Lay numbers out as a constant was, by the very reorder."""
    src = _choice(packer).operands["src"]
    # weights are large: where they lie already as they are read, they are not copied
    in_place = src == MemoryDesc(src.dims, src.dtype) and tensor.is_contiguous()
    source = tensor.view(-1).view(torch.uint8) if in_place else _packed(tensor, src, room)
    flat = {"src": source, "dst": room.take(packer.descs[0].nbytes, 0)}
    _run(packer, dnnl.Primitive(_choice(packer).handle), flat, room)
    return flat["dst"]


def _packed(tensor: torch.Tensor, desc: MemoryDesc, room: _Room) -> torch.Tensor:
    bits = tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype is torch.bfloat16 else tensor.numpy()
    flat = room.take(desc.nbytes, 0)
    pack(bits, desc, flat.numpy())
    return flat


def _packed_by_library(tensor: torch.Tensor, md: dnnl.NativeDesc, room: _Room) -> torch.Tensor:
    """Lay numbers out in a format that only the library knows."""
    plain = MemoryDesc(tensor.shape, tensor_type(tensor).dtype)
    source, result = _packed(tensor, plain, room), room.take(md.nbytes, 0)
    engine, native = dnnl.Engine.cpu(), dnnl.NativeDesc.from_desc(plain)
    memories: dict[int | dnnl.Arg, dnnl.Memory] = {
        dnnl.Arg.FROM: dnnl.Memory(engine, native, source.data_ptr()),
        dnnl.Arg.TO: dnnl.Memory(engine, md, result.data_ptr()),
    }
    dnnl.Primitive(dnnl.create(dnnl.Reorder(src=native, dst=md))).execute(dnnl.Stream(engine), memories)
    return result


def _unpacked(flat: torch.Tensor, desc: MemoryDesc) -> torch.Tensor:
    array = unpack(flat.numpy().view(desc.dtype.numpy_dtype), desc)
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.view(torch.bfloat16) if desc.dtype is DataType.BF16 else tensor
