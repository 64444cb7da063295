"""Self-check of a plan: each implementation runs once on small numbers and is compared with its reference.

Of those that differ in large sizes alone, one is checked (:mod:`fmtprop.runtime.likeness`).

This includes implementations that ran during the build: a reorder that packed an operand of a step packs the operand's
numbers in the step's check; other nodes on constants are checked by themselves. All other operands are packed, and
results unpacked, by the project's own numpy code, so that the check does not depend on the checked library. Passed
checks are recorded on disk by problem, library, CPU and threads.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch

from fmtprop.errors import PlanError
from fmtprop.ir import Choice, Node, opdef, result_names
from fmtprop.layout import DataType, MemoryDesc, pack, unpack
from fmtprop.ops.quantization import to_bytes
from fmtprop.passes.target import candidate_of
from fmtprop.runtime.agreement import (
    error_of_bytes,
    error_of_numbers,
    error_of_rounded,
    least_magnitude,
    rounding_of,
    small_numbers,
    steps_of,
    tolerance_of,
)
from fmtprop.runtime.constants import run_once
from fmtprop.runtime.convolve import convolve
from fmtprop.runtime.cut_down import cut_down
from fmtprop.runtime.likeness import describe_likeness, likeness_in_model
from fmtprop.runtime.plan import Plan, Step
from fmtprop.store import Store, key_of
from fmtprop.targets.bound import MovableMemory, Place
from fmtprop.targets.executable import Executable, Targets, implementation, threads_here
from fmtprop.targets.memory import align, aligned_bytes, view
from fmtprop.targets.pytorch import call_reference
from fmtprop.tuning.identity import describe_result

#: references of ops that PyTorch would run with its own copy of oneDNN
_INDEPENDENT = {"convolution": convolve}

#: takes the place of a result that is wrong as a whole
_NOTHING = torch.empty(0, 0, device="cpu")

#: guard bytes after a result, which must not change: their number and their value
_GUARD_NBYTES, _GUARD_BYTE = 4096, 0x55

#: bytes of memory that all checks share; further bytes are allocated for each check
_SHARED_NBYTES = 48 << 20


@dataclass(frozen=True)
class Mismatch:
    """A primitive that gave a wrong result."""

    node: Node
    #: largest error relative to the largest magnitude of the reference
    error: float
    #: benchdnn command line, or a description of the comparison
    repro: str
    #: the node for which it packed an operand. If no other implementation can pack it, `reader` needs another one.
    reader: Node | None = None

    def __str__(self) -> str:
        impl = self.node.choice.impl if self.node.choice is not None else "?"
        return f"{self.node.label}: {impl} is off by {self.error:.1e} relative; reproduce with: {self.repro}"


def check_steps(
    steps: Iterable[Step], store: Store, packed: Iterable[Node] = (), known: set[object] | None = None
) -> list[Mismatch]:
    """Check the distinct implementations that are not known to be right: one of those that are alike.

    `packed`: nodes that ran once, on constants. Nodes that packed an operand of a step are checked with the step.
    Others are checked unless only the library can read their result. `known`: likenesses of what passed in the model's
    plans for other shapes: what differs in sizes alone is right, too. Those of a plan that passes are added.
    """
    steps = [step for step in steps if implementation(step.node).needs_check(step.node)]
    likeness = _Likenesses()
    steps = [step for step in steps if not known or not likeness.is_known(step, known)]
    covered = {node.name for step in steps for node in step.packing.values()}
    # nodes that do not pack for a step: their readers are others
    alone = [node for node in packed if _is_readable(node) and node.name not in covered]
    alone = [node for node in alone if not known or likeness.of_node(node) not in known]
    distinct: dict[object, Step | Node] = {}
    for step in steps:
        distinct.setdefault(_likeness(step), step)
    work: dict[str, Step | Node] = {}
    for one in (*distinct.values(), *alone):
        work.setdefault(_key(one), one)
    room = _Room()
    passed: set[str] = set()
    alike: set[str] = set()
    mismatches = []
    for key, one in work.items():
        if store.has_passed(key):
            continue
        rough = _key(one, hashed=_likeness_key)
        if rough in alike:  # it is not recorded: of another model, it may be the one that is checked
            continue
        # steps of several sizes are alike when they are cut down
        small = _key(one, room)
        if small not in passed and not store.has_passed(small):
            wrong = _wrong_in(one, room) if isinstance(one, Step) else _wrong(one, room)
            if wrong is not None:
                mismatches.append(wrong)
                continue
        passed |= {key, small}
        alike.add(rough)
    store.add_passed(passed)
    if known is not None and not mismatches:
        known |= likeness.of_all(steps, alone)
    return mismatches


def likenesses(plan: Plan) -> set[object]:
    """Return the likenesses of a plan that passed, as :func:`check_steps` knows them."""
    steps = [step for step in plan.steps if implementation(step.node).needs_check(step.node)]
    return _Likenesses().of_all(steps, filter(_is_readable, plan.packed))


class _Likenesses:
    """Likenesses within a model, each made once for equal nodes of one implementation."""

    def __init__(self) -> None:
        self._made: dict[object, object] = {}

    def of_node(self, node: Node) -> object:
        operands = tuple(_choice(node).operands.items())
        key = id(implementation(node)), node.op, node.attrs, node.post_ops, node.grid_forms, operands, node.descs
        if key not in self._made:
            self._made[key] = likeness_in_model(node)
        return self._made[key]

    def of_step(self, step: Step) -> object:
        return self.of_node(step.node), _adds_in_place(step)

    def is_known(self, step: Step, known: Container[object]) -> bool:
        """Return whether a step, and what packed its operands, is alike to those that passed."""
        return self.of_step(step) in known and all(self.of_node(node) in known for node in step.packing.values())

    def of_all(self, steps: Iterable[Step], packed: Iterable[Node]) -> set[object]:
        packers = (node for step in steps for node in step.packing.values())
        return {self.of_step(step) for step in steps} | {self.of_node(node) for node in (*packers, *packed)}


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


def _likeness(step: Step) -> tuple[object, ...]:
    """Return properties that only steps with the same key share; the key takes longer."""
    node, handle = step.node, id(implementation(step.node))
    formats = tuple(_choice(node).operands.items()), node.descs
    packing = tuple((name, _choice(one).operands["src"], id(implementation(one))) for name, one in step.packing.items())
    return handle, node.op, node.attrs, node.post_ops, node.grid_forms, formats, packing, _adds_in_place(step)


def primitive_key(node: Node) -> str:
    """Return a hash of everything that the result of a node's implementation depends on."""
    return key_of(describe_result(node, candidate_of(node)))


def _likeness_key(node: Node) -> str:
    return key_of(describe_likeness(node))


def _key(one: Step | Node, room: _Room | None = None, hashed: Callable[[Node], str] = primitive_key) -> str:
    """Return the key of a check: of a step or a node, or, with a room, of its form that is cut down."""
    node, packing = (one.node, one.packing) if isinstance(one, Step) else (one, {})
    key = hashed(node if room is None else room.cut_down(node, packing))
    in_place = isinstance(one, Step) and _adds_in_place(one)
    if not packing and not in_place:
        return key
    packers = {name: hashed(packer) for name, packer in packing.items()}
    return key_of({"step": key, "packing": packers, "in_place": in_place})


def _adds_in_place(step: Step) -> bool:
    """Whether a step adds to an operand in place although it need not."""
    name = implementation(step.node).may_add_to(step.node)
    return name is not None and step.operands[name].buffer == step.results[0].buffer


def _is_readable(node: Node) -> bool:
    return node.descs[0].kind == "blocked" and implementation(node).needs_check(node)


class _Room:
    """Memory that checks use one after another: new pages would take more time than the check itself."""

    def __init__(self) -> None:
        self._block = aligned_bytes(_SHARED_NBYTES)
        self._next = 0
        self._targets = Targets()
        self._small: dict[int, Node] = {}

    def cut_down(self, node: Node, packing: Mapping[str, Node]) -> Node:
        """Return a node cut down, or itself where it is small or cannot be cut; the room's user keeps the node."""
        if id(node) not in self._small:
            small = cut_down(node, self._targets.of(implementation(node)))
            # a reorder's constant has its full size
            fits = small is not None and all(_choice(small).operands[k] == _choice(node).operands[k] for k in packing)
            self._small[id(node)] = small if small is not None and fits else node
        return self._small[id(node)]

    def clear(self) -> None:
        """Make all memory free for the next check."""
        self._next = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """Return flat bytes, aligned to 64 bytes."""
        start, self._next = self._next, self._next + align(nbytes)
        return self._block[start : start + nbytes] if self._next <= _SHARED_NBYTES else aligned_bytes(nbytes)


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
    """
    room, way = room or _Room(), implementation(node)
    small = room.cut_down(node, packing)
    if small is not node:
        node, executable = small, None
    executable = executable or implementation(node).build(threads_here())
    for make in (_small, _zeros):
        try:
            numbers = {name: make(node, name) for name in _choice(node).operands}
            expected = call_reference(node, numbers, _INDEPENDENT)
        except PlanError:
            if way.takes_any_numbers:
                raise
            continue
        if sum(tensor.nbytes for tensor in numbers.values()) > _SHARED_NBYTES:
            numbers.clear()  # before the executable's are packed
        room.clear()
        added_to = way.may_add_to(node) if in_place else way.residual(node)
        trial = _Trial(node, executable, room, packing, _Numbers(node, make, numbers), added_to)
        return _worst(node, trial.results(expected), expected)
    return None


@dataclass(frozen=True)
class _Numbers:
    """The numbers of a node's operands, as its reference got them."""

    node: Node
    make: Callable[..., torch.Tensor]
    #: those that are in memory still
    made: dict[str, torch.Tensor]

    def of(self, name: str, dtype: DataType | None = None) -> torch.Tensor:
        """Return the numbers of an operand, in another data type if one is given, and let go of them."""
        if dtype in (None, _choice(self.node).operands[name].dtype) and name in self.made:
            return self.made.pop(name)
        return self.make(self.node, name, dtype)


def _choice(node: Node) -> Choice:
    if node.choice is None:
        raise PlanError(f"{node.label} has no choice: assign formats before checking")
    return node.choice


def _small(node: Node, name: str, dtype: DataType | None = None) -> torch.Tensor:
    for operand, source, make in opdef(node.op).numbers.made_of:
        if operand == name:
            made: torch.Tensor = make(_small(node, source))
            return made
    return small_numbers(node, name, _choice(node).operands[name], dtype).contiguous()


def _zeros(node: Node, name: str, dtype: DataType | None = None) -> torch.Tensor:
    return torch.zeros_like(_small(node, name, dtype))


def _worst(node: Node, results: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor]) -> float | None:
    worst = 0.0
    for index, (got, wanted) in enumerate(zip(results, expected, strict=True)):
        grid = node.grids.get(result_names(node)[index])
        if got is None:
            error = 0.0
        elif grid is not None and got.shape == wanted.shape:
            first, second = (to_bytes(one, grid) if one.is_floating_point() else one for one in (got, wanted))
            error = error_of_bytes(first, second, steps_of(node, grid))
        elif (rounding := rounding_of(node)) is not None:
            error = error_of_rounded(got, wanted, rounding, least_magnitude(node))
        else:
            error = error_of_numbers(got, wanted, least_magnitude(node))
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
        numbers: _Numbers,
        added_to: str | None = None,
    ) -> None:
        self.node, self.executable, self.room, self.packing = node, executable, room, packing
        self.numbers, self.added_to = numbers, added_to

    def results(self, expected: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return its results: None for an unreadable result; an empty tensor if it fails or writes outside."""
        node, way = self.node, implementation(self.node)
        operands = _choice(node).operands
        places = {name: Place(MovableMemory(self._laid_out(name)), desc) for name, desc in operands.items()}
        written = []
        for index, (name, desc) in enumerate(zip(result_names(node), node.descs, strict=True)):
            room = 0 if way.makes_results else desc.nbytes + _GUARD_NBYTES
            memory = MovableMemory(self.room.take(room).fill_(_GUARD_BYTE)) if room else MovableMemory()
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
            return _packed_by(packer, self.numbers.of(name, _choice(packer).operands["src"].dtype), self.room)
        tensor = self.numbers.of(name)
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
    result = MovableMemory() if way.makes_results else MovableMemory(room.take(packer.descs[0].nbytes).fill_(0))
    places = {"src": Place(MovableMemory(source), src), "dst": Place(result, packer.descs[0])}
    run_once(packer, way.build(threads_here()), places)
    return result.tensor


def _packed(tensor: torch.Tensor, desc: MemoryDesc, room: _Room) -> torch.Tensor:
    flat = room.take(desc.nbytes + _GUARD_NBYTES)
    flat[desc.nbytes :] = _GUARD_BYTE  # a step that adds in place writes its result here
    if desc.is_plain and desc.is_packed:  # PyTorch transposes faster than numpy
        view(flat, desc).copy_(tensor)
        return flat
    bits = tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype is torch.bfloat16 else tensor.numpy()
    pack(bits, desc, flat[: desc.nbytes].zero_().numpy())
    return flat


def _unpacked(flat: torch.Tensor, desc: MemoryDesc) -> torch.Tensor:
    array = unpack(flat.numpy().view(desc.dtype.numpy_dtype), desc)
    tensor = torch.from_numpy(np.ascontiguousarray(array)).reshape(desc.dims)  # numpy gives a scalar one axis
    return tensor.view(torch.bfloat16) if desc.dtype is DataType.BF16 else tensor
