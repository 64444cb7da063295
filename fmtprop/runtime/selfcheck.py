"""Self-check of a plan: each distinct implementation runs once on small numbers and is compared with its reference.

This includes implementations that ran during the build: a reorder that packed an operand of a step packs the operand's
numbers in the step's check; other nodes on constants are checked by themselves. All other operands are packed, and
results unpacked, by the project's own numpy code, so that the check does not depend on the checked library. Passed
checks are recorded on disk by problem, library, CPU and threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np
import torch

from fmtprop.errors import PlanError
from fmtprop.ir.node import Choice, Node
from fmtprop.ir.ports import result_names
from fmtprop.layout import DataType, MemoryDesc, pack, unpack
from fmtprop.runtime.agreement import error_of_numbers, small_numbers, tolerance_of
from fmtprop.runtime.constants import run_once
from fmtprop.runtime.convolve import convolve
from fmtprop.runtime.cut_down import cut_down
from fmtprop.runtime.plan import Step
from fmtprop.store import Store, key_of
from fmtprop.targets.bound import Memory, Place
from fmtprop.targets.executable import Executable, Targets, implementation, threads_here
from fmtprop.targets.memory import ALIGNMENT_NBYTES, aligned_bytes
from fmtprop.targets.pytorch import call_reference
from fmtprop.tuning.identity import persistent_text

#: references of ops that PyTorch would run with its own copy of oneDNN
_INDEPENDENT = {"convolution": convolve}

#: (node, operand, data type) -> numbers for the operand
Numbers = Callable[..., torch.Tensor]

#: takes the place of a result that is wrong as a whole
_NOTHING = torch.empty(0, 0, device="cpu")

#: guard bytes after a result, which must not change: their number and their value
_GUARD_NBYTES, _GUARD_BYTE = 4096, 0x55

#: bytes of memory that all checks share; further bytes are allocated for each check
_SHARED_NBYTES = 48 << 20


@dataclass(frozen=True)
class Mismatch:
    """A primitive that gave a wrong result.

    Parameters
    ----------
    node : Node
        The node of the primitive.
    error : float
        Largest error relative to the largest magnitude of the reference.
    repro : str
        benchdnn command line, or a description of the comparison.
    reader : Node, optional
        The node for which it packed an operand. If no other implementation can pack it, `reader` needs another one.
    """

    node: Node
    error: float
    repro: str
    reader: Node | None = None

    def __str__(self) -> str:
        impl = self.node.choice.impl if self.node.choice is not None else "?"
        return f"{self.node.label}: {impl} is off by {self.error:.1e} relative; reproduce with: {self.repro}"


def check_steps(steps: Iterable[Step], store: Store, packed: Iterable[Node] = ()) -> list[Mismatch]:
    """Check every distinct implementation that is not known to be right.

    Parameters
    ----------
    steps : iterable of Step
        A plan's steps; steps that run the reference itself are not checked.
    store : Store
        Passed checks; new ones are added.
    packed : iterable of Node
        Nodes that ran once, on constants. Nodes that packed an operand of a step are checked with the step. Others are
        checked unless only the library can read their result.

    Returns
    -------
    list of Mismatch
        The implementations that are wrong.
    """
    steps = [step for step in steps if implementation(step.node).needs_check(step.node)]
    covered = {node.name for step in steps for node in step.packing.values()}
    # nodes that do not pack for a step: their readers are others
    alone = [node for node in packed if _is_readable(node) and node.name not in covered]
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
    error = check_node(node, room=room)
    return None if error is None else _mismatch(node, error)


def _wrong_in(step: Step, room: _Room) -> Mismatch | None:
    """Return the mismatch of the step's implementation, or of one that packed an operand for it."""
    in_place = _adds_in_place(step)
    error = check_node(step.node, step.executable, room, step.packing, in_place)
    if error is None:
        return None
    if step.packing and check_node(step.node, step.executable, room, {}, in_place) is None:
        packers = list(step.packing.values())
        packer = next((node for node in packers if _is_readable(node) and _wrong(node, room)), packers[0])
        return _mismatch(packer, error, step.node)
    return _mismatch(step.node, error)


def _mismatch(node: Node, error: float, reader: Node | None = None) -> Mismatch:
    return Mismatch(node, error, implementation(node).repro, reader)


def _step_key(step: Step) -> str:
    packing = {name: primitive_key(node) for name, node in step.packing.items()}
    key, in_place = primitive_key(step.node), _adds_in_place(step)
    return key_of({"step": key, "packing": packing, "in_place": in_place}) if packing or in_place else key


def _adds_in_place(step: Step) -> bool:
    """Whether a step adds to an operand in place although it need not."""
    name = implementation(step.node).may_add_to(step.node)
    return name is not None and step.operands[name].buffer == step.results[0].buffer


def _is_readable(node: Node) -> bool:
    return node.descs[0].kind == "blocked" and implementation(node).needs_check(node)


def primitive_key(node: Node) -> str:
    """Return a hash of everything that the result of a node's implementation depends on."""
    choice = _choice(node)
    problem = {
        "op": node.op,
        "attrs": node.attrs.to_json(),
        "post_ops": [(p.op, p.attrs.to_json(), p.operand) for p in node.post_ops],
        "target": choice.target,
        "impl": choice.impl,
        **implementation(node).identity,
        "operands": {name: persistent_text(desc) for name, desc in choice.operands.items()},
        "results": [persistent_text(desc) for desc in node.descs],
    }
    return key_of(problem)


class _Room:
    """Memory that checks use one after another: new pages would take more time than the check itself."""

    def __init__(self) -> None:
        self._block = aligned_bytes(_SHARED_NBYTES)
        self._next = 0
        #: targets of cut-down nodes
        self.targets = Targets()

    def clear(self) -> None:
        """Make all memory free for the next check."""
        self._next = 0

    def take(self, nbytes: int, fill: int) -> torch.Tensor:
        """Return flat bytes of one value, aligned to 64 bytes."""
        start, self._next = self._next, self._next + -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
        taken = self._block[start : start + nbytes] if self._next <= _SHARED_NBYTES else aligned_bytes(nbytes)
        return taken.fill_(fill)


def check_node(
    node: Node,
    executable: Executable | None = None,
    room: _Room | None = None,
    packing: Mapping[str, Node] = MappingProxyType({}),
    in_place: bool = False,
) -> float | None:
    """Run a node as a plan does, on small numbers; return its relative error if it is too large, else None.

    A large node is cut down to fewer rows or images if the same implementation runs it. A node that refuses the
    numbers is not checked: it may expect indices, or a special matrix.

    Parameters
    ----------
    node : Node
        Formatted.
    executable : Executable, optional
        The executable of its choice.
    room : optional
        Memory of earlier checks.
    packing : mapping of str to Node, optional
        Reorders that pack operands; other operands are packed by the project's own code.
    in_place : bool
        Whether it adds to its operand in place.
    """
    room, way = room or _Room(), implementation(node)
    small = cut_down(node, room.targets.of(way))
    # a reorder's constant has its full size
    if small is not None and all(
        _choice(small).operands[name] == _choice(node).operands[name] for name in packing or ()
    ):
        node, executable = small, None
    executable = executable or implementation(node).build(threads_here())
    for numbers in (_small, _zeros):
        try:
            # weights are large: the reference's numbers are freed before the executable's are packed
            given = {name: numbers(node, name) for name in _choice(node).operands}
            expected = call_reference(node, given, _INDEPENDENT)
            del given
        except PlanError:
            if way.takes_any_numbers:
                raise
            continue
        room.clear()
        added_to = way.may_add_to(node) if in_place else way.residual(node)
        trial = _Trial(node, executable, room, packing, numbers, added_to)
        return _worst(node, trial.results(expected), expected)
    return None


def _choice(node: Node) -> Choice:
    if node.choice is None:
        raise PlanError(f"{node.label} has no choice: assign formats before checking")
    return node.choice


def _small(node: Node, name: str, dtype: DataType | None = None) -> torch.Tensor:
    return small_numbers(node, name, _choice(node).operands[name], dtype).contiguous()


def _zeros(node: Node, name: str, dtype: DataType | None = None) -> torch.Tensor:
    return torch.zeros_like(_small(node, name, dtype))


def _worst(node: Node, results: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor]) -> float | None:
    worst = 0.0
    for index, (got, wanted) in enumerate(zip(results, expected, strict=True)):
        error = 0.0 if got is None else error_of_numbers(got, wanted)
        if error > tolerance_of(node, index):
            worst = max(worst, error)
    return worst or None


class _Trial:
    """One run of an executable on the check's numbers."""

    def __init__(
        self,
        node: Node,
        executable: Executable,
        room: _Room,
        packing: Mapping[str, Node],
        numbers: Numbers,
        added_to: str | None = None,
    ) -> None:
        self.node, self.executable, self.room, self.packing = node, executable, room, packing
        self.numbers, self.added_to = numbers, added_to

    def results(self, expected: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return its results: None for an unreadable result; an empty tensor if it fails or writes outside."""
        node, way = self.node, implementation(self.node)
        places = {name: Place(Memory(self._laid_out(name)), desc) for name, desc in _choice(node).operands.items()}
        written = []
        for index, (name, desc) in enumerate(zip(result_names(node), node.descs, strict=True)):
            memory = Memory() if way.makes_results else Memory(self.room.take(desc.nbytes + _GUARD_NBYTES, _GUARD_BYTE))
            if index == 0 and self.added_to is not None:
                memory = places[self.added_to].memory
            # a result with another shape than the exporter's fails at run time if a node reads it
            readable = expected[index].shape == torch.Size(desc.dims) and not desc.is_workspace
            places[name] = Place(memory, desc, is_read=readable)
            written.append(places[name])
        try:
            run_once(node, self.executable, places)
        except PlanError:
            if way.takes_any_numbers:
                raise
            return [_NOTHING for _ in written]
        read = _made if way.makes_results else _written
        return [read(place) if place.is_read else None for place in written]

    def _laid_out(self, name: str) -> torch.Tensor:
        """Return an operand's numbers in the node's format."""
        desc, packer = _choice(self.node).operands[name], self.packing.get(name)
        if packer is not None:
            return _packed_by(packer, self.numbers(self.node, name, _choice(packer).operands["src"].dtype), self.room)
        tensor = self.numbers(self.node, name)
        if desc.kind == "blocked":
            return _packed(tensor, desc, self.room)
        return self.executable.lay_out(self.node, name, tensor)


def _made(place: Place) -> torch.Tensor:
    """Return the tensor that was made for a place."""
    made = place.memory.tensor
    return made if made.layout is torch.strided else made.to_dense()


def _written(place: Place) -> torch.Tensor:
    """Return the tensor written to a place; an empty one if the guard bytes changed."""
    memory, desc = place.memory.tensor, place.desc
    # some operators resize the given tensor to hold intermediate results
    if not (memory[-_GUARD_NBYTES:] == _GUARD_BYTE).all():
        return _NOTHING
    return _unpacked(memory[: desc.nbytes], desc)


def _packed_by(packer: Node, tensor: torch.Tensor, room: _Room) -> torch.Tensor:
    """Pack numbers with the reorder that packed the constant."""
    src, way = _choice(packer).operands["src"], implementation(packer)
    # weights are large: if they have the source format already, they are not copied
    in_place = src == MemoryDesc(src.dims, src.dtype) and tensor.is_contiguous()
    source = tensor.view(-1).view(torch.uint8) if in_place else _packed(tensor, src, room)
    result = Memory() if way.makes_results else Memory(room.take(packer.descs[0].nbytes, 0))
    places = {"src": Place(Memory(source), src), "dst": Place(result, packer.descs[0])}
    run_once(packer, way.build(threads_here()), places)
    return result.tensor


def _packed(tensor: torch.Tensor, desc: MemoryDesc, room: _Room) -> torch.Tensor:
    bits = tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype is torch.bfloat16 else tensor.numpy()
    flat = room.take(desc.nbytes + _GUARD_NBYTES, _GUARD_BYTE)  # a step that adds in place writes its result here
    pack(bits, desc, flat[: desc.nbytes].zero_().numpy())
    return flat


def _unpacked(flat: torch.Tensor, desc: MemoryDesc) -> torch.Tensor:
    array = unpack(flat.numpy().view(desc.dtype.numpy_dtype), desc)
    tensor = torch.from_numpy(np.ascontiguousarray(array)).reshape(desc.dims)  # numpy gives a scalar one axis
    return tensor.view(torch.bfloat16) if desc.dtype is DataType.BF16 else tensor
