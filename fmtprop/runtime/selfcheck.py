"""A plan checks itself: each distinct implementation runs once on small numbers, beside the op's reference.

Those too that ran while the plan was made: reorders that packed an operand for a step lay out its numbers, and are so
checked with it; what else computed with constants is checked by itself. All other operands are laid out, and results
read, by the project's own numpy algebra, so that the check does not lean on the library it checks. What passed is
remembered on disk by problem, library, CPU and threads.
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
from fmtprop.runtime.agreement import TOLERANCE, error_of_numbers, small_numbers
from fmtprop.runtime.constants import run_once
from fmtprop.runtime.convolve import convolve
from fmtprop.runtime.cut_down import cut_down
from fmtprop.runtime.plan import Step
from fmtprop.store import Store, key_of
from fmtprop.targets.executable import Executable, Memory, Place, Targets, implementation, threads_here
from fmtprop.targets.memory import ALIGNMENT, aligned_bytes
from fmtprop.targets.pytorch import call_reference
from fmtprop.tuning.identity import persistent_text

#: what PyTorch would run by a oneDNN of its own
_INDEPENDENT = {"convolution": convolve}

#: numbers for an operand of a node: which, and in another data type
Numbers = Callable[..., torch.Tensor]

#: stands for a result that is wrong as a whole
_NOTHING = torch.empty(0, 0, device="cpu")

#: bytes behind a result's place that must stay as they are, and what they are
_GUARD_NBYTES, _GUARD = 4096, 0x55

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
    """Check every distinct implementation that is not known to be right.

    Parameters
    ----------
    steps : iterable of Step
        A plan's steps; those that are their own reference are right as they are.
    store : Store
        What passed before; extended.
    packed : iterable of Node
        Nodes that ran once, on constants. Those that packed an operand for a step are checked with the step; of the
        others, a result that only the library can read is passed over.

    Returns
    -------
    list of Mismatch
        Those that are wrong.
    """
    steps = [step for step in steps if implementation(step.node).needs_check(step.node)]
    covered = {node.name for step in steps for node in step.packing.values()}
    # what packs for no step by itself: others read it, or make something else of it
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
    """Return what is wrong: the step's implementation, or one that packed an operand for it."""
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
    """Whether a step adds to an operand that it need not add to."""
    name = implementation(step.node).may_add_to(step.node)
    return name is not None and step.operands[name].buffer == step.results[0].buffer


def _is_readable(node: Node) -> bool:
    return node.descs[0].kind == "blocked" and implementation(node).needs_check(node)


def primitive_key(node: Node) -> str:
    """Return a hash of everything that a node's result depends on, as it is implemented."""
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
    """Memory for one check after the other: on new pages, their arrival takes longer than anything else."""

    def __init__(self) -> None:
        self._block = aligned_bytes(_ROOM)
        self._next = 0
        #: asked for smaller problems
        self.targets = Targets()

    def clear(self) -> None:
        """Let the next check have it all."""
        self._next = 0

    def take(self, nbytes: int, fill: int) -> torch.Tensor:
        """Return flat bytes of one value, aligned to 64 bytes."""
        start, self._next = self._next, self._next + -(-nbytes // ALIGNMENT) * ALIGNMENT
        taken = self._block[start : start + nbytes] if self._next <= _ROOM else aligned_bytes(nbytes)
        return taken.fill_(fill)


def check_node(
    node: Node,
    executable: Executable | None = None,
    room: _Room | None = None,
    packing: Mapping[str, Node] = MappingProxyType({}),
    in_place: bool = False,
) -> float | None:
    """Run a node as a plan does, on small numbers; return its relative error where it is too large, else None.

    A large node runs cut down to fewer rows or images, where the same implementation does it. What takes none of the
    numbers that are made for it is not checked: they may be indices, or a matrix of some kind.

    Parameters
    ----------
    node : Node
        Formatted.
    executable : Executable, optional
        What was built of its choice.
    room : optional
        Memory of checks before.
    packing : mapping of str to Node, optional
        Reorders that are to lay out operands; others are laid out by the project's own algebra.
    in_place : bool
        Whether it adds to the operand that it may add to.
    """
    room, way = room or _Room(), implementation(node)
    small = cut_down(node, room.targets.of(way))
    # what a reorder packed is as large as it is
    if small is not None and all(
        _choice(small).operands[name] == _choice(node).operands[name] for name in packing or ()
    ):
        node, executable = small, None
    executable = executable or implementation(node).build(threads_here())
    for numbers in (_small, _zeros):
        try:
            # weights are large: what the reference reads is gone when the executable's are laid out
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
    for got, wanted, type_ in zip(results, expected, node.results, strict=True):
        error = 0.0 if got is None else error_of_numbers(got, wanted)
        if error > TOLERANCE.get(type_.dtype, 0.0):
            worst = max(worst, error)
    return worst or None


class _Trial:
    """One run of an executable on numbers of the check's own."""

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
        """Return what it gives; None for a result that nobody can read, nothing where it fails or writes elsewhere."""
        node, way = self.node, implementation(self.node)
        places = {name: Place(Memory(self._laid_out(name)), desc) for name, desc in _choice(node).operands.items()}
        written = []
        for index, (name, desc) in enumerate(zip(result_names(node), node.descs, strict=True)):
            memory = Memory() if way.makes_results else Memory(self.room.take(desc.nbytes + _GUARD_NBYTES, _GUARD))
            if index == 0 and self.added_to is not None:
                memory = places[self.added_to].memory
            # what is of another shape than the exporter says fails the run where anybody reads it
            places[name] = Place(memory, desc, is_read=expected[index].shape == torch.Size(desc.dims))
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
        """Return an operand's numbers as it reads them."""
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
    """Return what was written to a place; nothing where more was written than that."""
    memory, desc = place.memory.tensor, place.desc
    # some operators resize what they are given to hold what they make on the way
    if not (memory[-_GUARD_NBYTES:] == _GUARD).all():
        return _NOTHING
    return _unpacked(memory[: desc.nbytes], desc)


def _packed_by(packer: Node, tensor: torch.Tensor, room: _Room) -> torch.Tensor:
    """Lay numbers out as a constant was, by the very reorder."""
    src, way = _choice(packer).operands["src"], implementation(packer)
    # weights are large: where they lie already as they are read, they are not copied
    in_place = src == MemoryDesc(src.dims, src.dtype) and tensor.is_contiguous()
    source = tensor.view(-1).view(torch.uint8) if in_place else _packed(tensor, src, room)
    result = Memory() if way.makes_results else Memory(room.take(packer.descs[0].nbytes, 0))
    places = {"src": Place(Memory(source), src), "dst": Place(result, packer.descs[0])}
    run_once(packer, way.build(threads_here()), places)
    return result.tensor


def _packed(tensor: torch.Tensor, desc: MemoryDesc, room: _Room) -> torch.Tensor:
    bits = tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype is torch.bfloat16 else tensor.numpy()
    flat = room.take(desc.nbytes + _GUARD_NBYTES, _GUARD)  # whoever adds to it writes the result here
    pack(bits, desc, flat[: desc.nbytes].zero_().numpy())
    return flat


def _unpacked(flat: torch.Tensor, desc: MemoryDesc) -> torch.Tensor:
    array = unpack(flat.numpy().view(desc.dtype.numpy_dtype), desc)
    tensor = torch.from_numpy(np.ascontiguousarray(array)).reshape(desc.dims)  # numpy makes an axis of none
    return tensor.view(torch.bfloat16) if desc.dtype is DataType.BF16 else tensor
