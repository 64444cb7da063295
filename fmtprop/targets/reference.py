"""The reference target: any op, by PyTorch's own operator or its plain PyTorch meaning, on strided formats.

All other targets are checked against it. It runs the ops that oneDNN lacks, and is an alternative for all others:
oneDNN's reference loops (`ref`) are never faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from fmtprop.ir import Bytes, Category, Node, Reads, opdef, result_names
from fmtprop.ir.tensors import torch_dtype
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops.building import several
from fmtprop.ops.pytorch import TorchDispatchMode, tree_leaves
from fmtprop.ops.without_data import by_rule
from fmtprop.passes.assignment.formats import channels_last, like, plain, worth_trying
from fmtprop.passes.precision.in_bytes import in_reals
from fmtprop.passes.target import Candidate, Request
from fmtprop.targets.bound import REFUSED, Bound, Making, OwnStream, Place
from fmtprop.targets.executable import Executable, Implementation, Provider
from fmtprop.targets.pytorch import bind, copying

#: who executes, in choices and reports
REFERENCE = "reference"

#: how: by PyTorch's operator that writes to the plan's memory, where the op declares one; by the op's reference alone
OPERATOR, MEANING = "torch", "torch_reference"

#: bytes per second that a PyTorch copy moves; only the order of costs matters
_BYTES_PER_SECOND = 5e9

#: bytes of operands and results of a step up to which copies take less time than a new call in each run, 20 us
_COPIED_NBYTES = 1 << 16


class ReferenceTarget(Provider):
    """Runs a node by its op's reference on torch tensors over the plan's own buffers."""

    name = REFERENCE

    def __init__(self) -> None:
        #: nodes with a wrong result on strides that are not row-major
        self._rejected: set[object] = set()
        #: nodes with a wrong result on row-major operands: their operator is wrong
        self._without_operator: set[object] = set()
        #: what operators of like nodes make
        self._making: dict[object, _Made | None] = {}

    def reject(self, node: Node) -> None:
        """Never again run a node, or one like it, so: on operands that are not row-major, or else by its operator."""
        if node.choice is None or node.choice.target != self.name:
            return
        (self._rejected if reads_strides(node) else self._without_operator).add(_identity(node))

    def candidates(self, node: Node, request: Request) -> Iterable[Candidate]:
        """Yield the one way: operands as asked where they are strided and the op is right with that, else row-major.

        For `any`, the order of axes is the first operand's if the op is right on it.
        """
        if opdef(node.op).numbers.bytes(node.attrs) is not Bytes.CONVERTED:
            request = in_reals(node, request)
        free = opdef(node.op).pytorch.any_strides(node.attrs) and _identity(node) not in self._rejected
        names = result_names(node)
        views = {name for name in opdef(node.op).pytorch.repeated(node.attrs) if request[name].has_broadcast}
        formats = {
            name: _strided(desc) if (free or name in names) and _is_read_in_place(node, desc) else plain(desc)
            for name, desc in request.items()
        } | {name: request[name] for name in views if _identity(node) not in self._rejected}
        if free and opdef(node.op).category is not Category.VIEW:
            formats |= _following({**request, **{n: d for n, d in formats.items() if request[n].is_plain}}, names)
        if node.residual is not None:
            formats[node.residual] = formats["dst"]  # both are one buffer
        results = tuple(formats[name] for name in names)
        if any(results[i] != request[name] and request[name].kind != "any" for i, name in enumerate(names)):
            return
        operands = {name: desc for name, desc in formats.items() if name not in names}
        if node.op == "reorder" and operands["src"] != request["src"]:
            return
        cost = sum(desc.nbytes for desc in formats.values()) / _BYTES_PER_SECOND
        impl = MEANING if _identity(node) in self._without_operator else OPERATOR
        made = self._made(node, operands, results) if impl is OPERATOR else None
        if made is not None:
            own = zip(names, results, made.formats, strict=True)
            results = tuple(its if request[name].kind == "any" else desc for name, desc, its in own)
        kind = ReferenceImplementation if made is None or made.is_written else MakingImplementation
        yield Candidate(self.name, impl, operands, results, cost, handle=kind(impl))

    def _made(self, node: Node, operands: Mapping[str, MemoryDesc], results: Sequence[MemoryDesc]) -> _Made | None:
        """Return what an operator makes that cannot write to given memory; None for any other node."""
        if node.post_ops or opdef(node.op).pytorch.operator is None:
            return None
        key = node.op, node.attrs, tuple((name, desc.at_start()) for name, desc in operands.items()), len(results)
        if key not in self._making:
            self._making[key] = _made_formats(node, operands, results)
        return self._making[key]

    def reorder_cost(self, src: MemoryDesc, dst: MemoryDesc) -> float | None:
        """Return the time of a strided copy; None for blocked or opaque formats."""
        if not (src.is_plain and dst.is_plain):
            return None
        return 0.0 if src == dst else (src.nbytes + dst.nbytes) / _BYTES_PER_SECOND

    def formats(self, dims: tuple[int, ...], dtype: DataType) -> Sequence[MemoryDesc]:
        """Return the strided formats that PyTorch knows: row-major and channels-last."""
        return worth_trying(dims, dtype, ())


@dataclass(frozen=True)
class ReferenceImplementation(Implementation):
    """An op's reference, or PyTorch's operators in its place."""

    impl: str

    by_operators = True
    identity = MappingProxyType({"torch": torch.__version__, "as": "it is bound"})

    @property
    def repro(self) -> str:
        """In words: there is no program for it."""
        return "the operator on the same numbers in these formats, and the op's reference on them row-major"

    def target(self) -> Provider:
        """Return a reference target."""
        return ReferenceTarget()

    def build(self, threads: int) -> Executable:
        """Return the executable; operators find the number of threads themselves."""
        return _OperatorExecutable(by_operator=self.impl != MEANING)

    def may_change(self, node: Node) -> str | None:
        """Return the operand that PyTorch's operator can change: a part of it, or all of it."""
        facts = opdef(node.op).pytorch
        if node.post_ops or self.impl == MEANING:
            return None
        return facts.changed(node.attrs) or facts.overwritten(node.attrs)

    def needs_check(self, node: Node) -> bool:
        """Return whether it runs in another way than the reference: by an operator, or on strides."""
        if node.op == "reorder" or not opdef(node.op).numbers.checkable(node.attrs):
            return False  # which copies
        by_operator = opdef(node.op).pytorch.operator is not None and self.impl != MEANING
        return reads_strides(node) or (by_operator and node.choice is not None and bool(node.choice.operands))


class MakingImplementation(ReferenceImplementation):
    """An operator that makes its results, since it cannot write to given memory."""

    makes_results = True
    identity = MappingProxyType({"torch": torch.__version__, "as": "it makes results"})

    def build(self, threads: int) -> Executable:
        """Return the executable."""
        return _MakingExecutable()


class _OperatorExecutable(Executable):
    def __init__(self, *, by_operator: bool) -> None:
        self._by_operator = by_operator

    def bind(self, node: Node, places: Mapping[str, Place], stream: OwnStream) -> Bound:
        names = () if node.choice is None else node.choice.operands
        read = {name: places[name] for name in names}
        written = [places[name] if places[name].is_read else None for name in result_names(node)]
        used = [*read.values(), *(place for place in written if place is not None)]
        passing = [place for place in used if not place.memory.is_fixed]
        seen = {id(place): place.memory.viewed_as(place.desc) for place in passing}
        standing = {key: tensor for key, tensor in seen.items() if tensor is not None}
        lasting = {id(place): place.tensor() for place in used if place.memory.is_fixed}
        if len(standing) == len(seen):
            with _ReadCheck(standing.values()) as check:
                call = self._call(node, read, written, {**lasting, **standing})
            if not check.found:
                return Bound(python=(node, [call]))
            if sum(place.desc.nbytes for place in passing) <= _COPIED_NBYTES:
                return Bound(python=(node, self._beside(node, read, written, lasting, standing)))

        def run() -> object:
            return self._call(node, read, written, lasting)()

        return Bound(python=(node, [run]))

    def _beside(
        self,
        node: Node,
        read: Mapping[str, Place],
        written: Sequence[Place | None],
        lasting: Mapping[int, torch.Tensor],
        standing: Mapping[int, torch.Tensor],
    ) -> list[Callable[[], object]]:
        """Return calls on tensors that stay where they are, with copies from and to those that do not."""
        own = {key: torch.empty_like(tensor) for key, tensor in standing.items()}
        call = self._call(node, read, written, {**lasting, **own})
        passing = [id(place) for place in read.values() if id(place) in own]
        made = [id(place) for place in written if id(place) in own]
        before = [partial(own[key].copy_, standing[key]) for key in passing]
        return [*before, call, *(partial(standing[key].copy_, own[key]) for key in made)]

    def _call(
        self,
        node: Node,
        read: Mapping[str, Place],
        written: Sequence[Place | None],
        known: Mapping[int, torch.Tensor],
    ) -> Callable[[], object]:
        def tensor(place: Place) -> torch.Tensor:
            found = known.get(id(place))
            return place.tensor() if found is None else found

        operands = {name: tensor(place) for name, place in read.items()}
        results = [None if place is None else tensor(place) for place in written]
        return bind(node, operands, results, by_operator=self._by_operator)


class _MakingExecutable(Executable):
    """An operator that makes its results."""

    def bind(self, node: Node, places: Mapping[str, Place], stream: OwnStream) -> Bound:
        read = {} if node.choice is None else {name: places[name] for name in node.choice.operands}
        written = [places[name] for name in result_names(node)]
        memories = [place.memory if place.is_read else None for place in written]
        results = [_without_data(place.desc) if place.is_read else None for place in written]
        standing = {name: p.tensor() if p.memory.is_fixed else p.memory.viewed_as(p.desc) for name, p in read.items()}
        tensors = {name: tensor for name, tensor in standing.items() if tensor is not None}
        if len(tensors) == len(read):
            with _ReadCheck(tensor for name, tensor in tensors.items() if not read[name].memory.is_fixed) as check:
                made = copying(node, tensors, results)
            if made is not None and not check.found:
                operands = [*tensors.values()] if made.may_share else []
                return Bound(python=(node, [Making(node, made.call, memories, operands)]))

        def run() -> None:
            tensors = {name: place.tensor() for name, place in read.items()}
            found = copying(node, tensors, results)  # none if complex operands do not begin at an even place
            call = partial(opdef(node.op).reference, node.attrs, tensors) if found is None else found.call
            Making(node, call, memories, [*tensors.values()])()

        return Bound(python=(node, [run]))


class _ReadCheck(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether an operator reads one of some tensors: a call may keep a view of it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nobody traces this mode; PyTorch would import its compiler to keep that out."""
        return False

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watched = {id(tensor) for tensor in tensors}
        self.found = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator."""
        self.found = self.found or any(id(value) in self._watched for value in tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))


def _without_data(desc: MemoryDesc) -> torch.Tensor:
    return torch.empty_strided(desc.dims, desc.strides, dtype=torch_dtype(desc.dtype), device="meta")


class _Made(NamedTuple):
    """Results that an operator makes: their formats, and whether a step writes them nevertheless.

    It writes the parts of complex results, and leaves out results that are None, of gradients that nobody requested.
    """

    formats: tuple[MemoryDesc, ...]
    is_written: bool


def _made_formats(node: Node, operands: Mapping[str, MemoryDesc], results: Sequence[MemoryDesc]) -> _Made | None:
    call = copying(node, {n: _without_data(d) for n, d in operands.items()}, [_without_data(d) for d in results])
    if call is None:
        return None
    try:
        ruled = None
        if call.overload is not None and all(desc.at_start() == plain(desc) for desc in operands.values()):
            # PyTorch imports its compiler for many of these shapes: 0.4 to 0.9 s of a process that loads a plan
            ruled = by_rule(call.overload, call.call.args, call.call.keywords, call.call.func)
        made = several(call.call() if ruled is None else ruled)
    except REFUSED:  # it reads numbers
        return _Made(tuple(results), is_written=True)
    if any(one is None for one in made):
        return _Made(tuple(results), is_written=True)
    real = [torch.view_as_real(one.resolve_conj().resolve_neg()) if one.is_complex() else one for one in made]
    formats = tuple(_own_format(value, desc) for value, desc in zip(real, results, strict=True))
    return _Made(formats, is_written=any(value.is_complex() for value in made))


def _own_format(value: torch.Tensor, desc: MemoryDesc) -> MemoryDesc:
    """Return the format of a result without data; the other one, if it is row-major or has gaps."""
    is_dense = value.shape == desc.dims and bool(torch.ops.aten.is_non_overlapping_and_dense.default(value))
    return desc if value.is_contiguous() or not is_dense else MemoryDesc(desc.dims, desc.dtype, strides=value.stride())


def reads_strides(node: Node) -> bool:
    """Return whether a formatted node has operands that are not row-major."""
    operands = node.choice.operands if node.choice is not None else {}
    return any(desc.at_start() != plain(desc) for desc in operands.values())


def _identity(node: Node) -> object:
    return node.op, node.attrs, tuple((post_op.op, post_op.attrs) for post_op in node.post_ops)


def _is_read_in_place(node: Node, desc: MemoryDesc) -> bool:
    """Return whether PyTorch's operator works on a format, and not on a copy."""
    reads = opdef(node.op).pytorch.reads
    if reads is Reads.ANY or not desc.is_plain or desc.at_start() == plain(desc):
        return True
    return reads is Reads.ROWS_OR_CHANNELS_LAST and desc.ndim > 3 and desc.at_start() == channels_last(desc)


def _strided(desc: MemoryDesc) -> MemoryDesc:
    return desc if desc.is_plain else plain(desc)


def _following(request: Request, results: Sequence[str]) -> dict[str, MemoryDesc]:
    """Return formats for each `any` of a result, or of an operand of its size: axes in the first operand's order."""
    lead = next((desc for name, desc in request.items() if desc.is_plain and name not in results), None)
    if lead is None or not lead.is_dense:
        return {}
    dims = request[results[0]].dims
    found = {
        name: like(desc, lead)
        for name, desc in request.items()
        if desc.kind == "any" and (name in results or desc.dims == dims)
    }
    return {name: desc for name, desc in found.items() if desc is not None}
