"""The oneDNN target: asks the C API which formats a node can run in, and keeps the primitive descriptor that answered.

Owns the mapping from a graph node to a primitive descriptor (operands, attributes, post-ops). Must not know how
nodes are ordered, buffered or run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import TypeVar

from fmtprop import dnnl
from fmtprop.errors import DnnlError, FormatError, GraphError, ShapeError, UnsupportedOpError
from fmtprop.ir import Bytes, Choice, Lowering, Node, Primitive, loses_special_values, opdef, ports, result_names
from fmtprop.jit import CHUNK_NBYTES, Kernel, kernel_for
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops.recurrent import Recurrent
from fmtprop.passes.assignment.formats import plain, worth_trying
from fmtprop.passes.target import AS_GRADIENT, EXCHANGED, Candidate, Request, equivalent_of, is_loop, of_name
from fmtprop.targets.arguments import tail_arguments
from fmtprop.targets.executable import Provider
from fmtprop.targets.experts import ExpertsImplementation, experts_candidates
from fmtprop.targets.kernel import KernelImplementation
from fmtprop.targets.kernels import kernel_candidates
from fmtprop.targets.known_bad import known_bad
from fmtprop.targets.primitive import PrimitiveImplementation, one_thread
from fmtprop.targets.requests import computable, is_short, stored_in
from fmtprop.targets.scaling import Function, Stored, byte_grids, chain_of, saturates, scaling_of, with_usual_scales

#: rough costs of a reorder for comparing choices: seconds per call, bytes per second
_CALL_SECONDS, _BYTES_PER_SECOND = 2e-6, 1e10

#: optimized implementations of a request that each primitive offers, in oneDNN's order: later ones are rarely the best
_IMPLEMENTATIONS = 3

#: what kernels of our own do with bytes
_BY_KERNELS = (Bytes.COMBINED, Bytes.TABULATED, Bytes.CONVERTED, Bytes.NORMALIZED, Bytes.MULTIPLIED)

#: statuses by which oneDNN declines, as opposed to failing
_DECLINED = frozenset({"unimplemented", "invalid_arguments"})

_T = TypeVar("_T")


class OneDnnTarget(Provider):
    """Candidates from the oneDNN library that is loaded, and from the kernels that run beside it.

    Answers are kept by value (op, attributes, post-ops, request), so that equal layers share one primitive descriptor.
    """

    name = "onednn"
    has_exact = True
    has_bytes = True
    has_training = True

    def __init__(self) -> None:
        self._answers: dict[object, _Answers] = {}
        #: primitives' answers for problems with usual scales
        self._usual: dict[object, _Answers] = {}
        #: candidates so far by op, attributes and post-ops: different requests share them
        self._found: dict[object, dict[object, Candidate]] = {}
        self._rejected: set[object] = set()
        #: attributes without operands, which many nodes share
        self._attrs: dict[object, dnnl.PrimitiveAttr] = {}

    def reject(self, node: Node) -> None:
        """Never offer again the implementation that a formatted node chose: it was wrong."""
        if node.choice is not None:
            self._rejected.add(_identity(node, node.choice.impl, node.choice.operands, node.descs))
            self.forget()

    def forget(self) -> None:
        """Let go of the answers given so far: most of their primitive descriptors will never be executed."""
        self._answers.clear()
        self._usual.clear()
        self._found.clear()

    def candidates(self, node: Node, request: Request) -> Iterable[Candidate]:
        """Yield every implementation that oneDNN offers for a request, its own order of preference first."""
        key = (node.op, node.attrs, _tail(node), node.exact, tuple(request), tuple(request.values()))
        if key not in self._answers:
            self._answers[key] = _Answers(self._ask(node, request))
        return self._answers[key]

    def named(self, node: Node, request: Request, choice: Choice) -> Iterable[Candidate]:
        """Yield the implementations with a choice's name, and make no descriptors of the others."""
        if choice.target != self.name:
            found: Iterable[Candidate] = self._kernels(node, request)
        else:
            own = self._implementations(node, request, choice.impl)
            found = chain(own, self._with_kernel(node, request, choice.impl))
        return of_name(found, choice)

    def reorder_cost(self, src: MemoryDesc, dst: MemoryDesc) -> float | None:
        """Return a rough time by the bytes moved; None where the destination repeats elements, and for workspaces."""
        if src == dst:
            return 0.0
        if dst.has_broadcast or src.is_workspace or dst.is_workspace:
            return None
        return _CALL_SECONDS + (src.nbytes + dst.nbytes) / _BYTES_PER_SECOND

    def formats(self, dims: tuple[int, ...], dtype: DataType) -> Sequence[MemoryDesc]:
        """Return the formats that this CPU's kernels are written for: channels-last, blocked by a vector, row-major."""
        return worth_trying(dims, dtype, (dnnl.lib().lanes,))

    def computes_in(self, dtype: DataType) -> bool:
        """Return whether the library can compute in a data type on this CPU."""
        return dtype is DataType.F32 or dnnl.supports(dtype)

    def is_fast_in(self, dtype: DataType) -> bool:
        """Return whether products in a data type are no slower than in f32.

        Without matrices of f16, sums of its products are in f32, and each operand is converted: convolutions and
        products of many rows take 1.4 to 2.8 times f32's time (Xeon, v3.2, one thread).
        """
        has_tiles = dtype is not DataType.F16 or dnnl.lib().includes("avx512_core_amx_fp16")
        return self.computes_in(dtype) and has_tiles

    def describe(self) -> dict[str, str]:
        """Return the library's instruction set and version."""
        library = dnnl.lib()
        version = ".".join(map(str, library.version))
        return {"isa": str(library.isa), "onednn": f"{version} ({library.hash[:8]}, {library.runtime})"}

    # ------------------------------------------------------------------ asking

    def _ask(self, node: Node, request: Request) -> Iterator[Candidate]:
        """Yield all implementations, those of the node without a last post-op that a kernel can do, and a kernel's."""
        yield from self._implementations(node, request)
        yield from self._with_kernel(node, request)
        yield from self._kernels(node, request)

    def _kernels(self, node: Node, request: Request) -> Iterator[Candidate]:
        """Yield the kernels that run alone."""
        if byte_grids(node, stored_in(request)):  # other kernels of our own compute with real numbers
            if opdef(node.op).numbers.bytes(node.attrs) in _BY_KERNELS:
                yield from self._not_rejected(node, kernel_candidates(node, request))
            return
        yield from self._not_rejected(node, kernel_candidates(node, request))
        if isinstance(node.attrs, Recurrent):  # other networks do without PyTorch's own oneDNN
            from fmtprop.targets.mkldnn.recurrent import recurrent_candidates

            yield from self._not_rejected(node, recurrent_candidates(node, request))
        yield from self._not_rejected(node, experts_candidates(node, request))

    def _not_rejected(self, node: Node, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
        for candidate in candidates:
            if not self._is_rejected(node, candidate.impl, candidate.operands, candidate.results):
                yield candidate

    def _with_kernel(self, node: Node, request: Request, named: str | None = None) -> Iterator[Candidate]:
        """Yield the implementations of a node without its last post-op, which a kernel does behind them."""
        kernel = _kernel_of(node)
        if kernel is None or kernel.is_faster == (node.exact and loses_special_values(node)):
            return
        if byte_grids(node, stored_in(request)):
            return
        shorter = node.with_(post_ops=node.post_ops[:-1])
        first = None if named is None else named.removesuffix(f"+{kernel.name}")
        if first is not None and first == named:
            return
        for candidate in self._implementations(shorter, request, first):
            dst = candidate.results[0].at_start()
            impl = f"{candidate.impl}+{kernel.name}"
            # padding stays zero, as zeros do
            fits = dst.kind == "blocked" and dst.is_dense and dst.nbytes % CHUNK_NBYTES == 0
            if candidate.is_ref or not fits or self._is_rejected(node, impl, candidate.operands, candidate.results):
                continue
            yield replace(candidate, impl=impl, handle=replace(candidate.handle, after=kernel))

    def _implementations(self, node: Node, request: Request, named: str | None = None) -> Iterable[Candidate]:
        """Return the op's own primitive's implementations, then those of its equivalents; maybe of one name alone."""
        usual = with_usual_scales(node, stored_in(request))
        if usual is None:
            return self._of_node(node, request, named)
        # numbers of post-ops decide nothing: layers that differ in scales alone are asked about once
        key = (usual.op, usual.attrs, _tail(usual), usual.exact, tuple(request), tuple(request.values()))
        if key not in self._usual:
            self._usual[key] = _Answers(iter(self._of_node(usual, request)))
        return (
            self._rescaled(node, request, candidate)
            for candidate in self._usual[key]
            if not self._is_rejected(node, candidate.impl, candidate.operands, candidate.results)
        )

    def _of_node(self, node: Node, request: Request, named: str | None = None) -> Iterable[Candidate]:
        if not is_short(node, request):
            return self._offers(node, request, named, is_alone=False)
        with one_thread():
            return list(self._offers(node, request, named, is_alone=True))

    def _rescaled(self, node: Node, request: Request, usual: Candidate) -> Candidate:
        """Return the candidate of a node with usual scales as one of the node itself."""
        known = self._found.setdefault((node.op, node.attrs, _tail(node)), {})
        identity = (usual.impl, tuple(usual.operands), tuple(usual.operands.values()), usual.results)
        if identity not in known:

            def recipe() -> dnnl.Recipe:
                natives = self._natives(node, request)
                assert natives is not None  # those of the node with usual scales are of the same kinds
                declaration = opdef(node.op)
                primitives = filter(None, (declaration.primitive, *declaration.equivalents))
                lowerings = (_lower(node, primitive, *natives) for primitive in primitives)
                others = [one.pd.recipe for one in lowerings if one is not None]
                # the same implementation may have been found by a request for other formats, which the problem has
                given: dnnl.Recipe = usual.handle.pd.recipe
                same = _without_formats(given.problem)
                return given._replace(attr=next(one.attr for one in others if _without_formats(one.problem) == same))

            known[identity] = replace(usual, handle=replace(usual.handle, pd=usual.handle.pd.remade(recipe)))
        return known[identity]

    def _offers(self, node: Node, request: Request, named: str | None, *, is_alone: bool) -> Iterator[Candidate]:
        """Yield the implementations for the number of threads that is set now, of all names or of one."""
        declaration = opdef(node.op)
        if declaration.primitive is None or not computable(node, request):
            return
        if node.exact and loses_special_values(node):
            return
        known = self._found.setdefault((node.op, node.attrs, _tail(node)), {})
        seen: set[int] = set()
        given = self._natives(node, request)
        if given is None:
            return
        asked = _asked(node, request, is_alone=is_alone, is_named=named is not None)
        for primitive in (declaration.primitive, *declaration.equivalents):
            is_own = primitive is declaration.primitive
            if named is not None and declaration.equivalents and is_own == bool(equivalent_of(named)):
                continue
            lowering = _lower(node, primitive, *given)
            if lowering is None:
                continue
            optimized, names = 0, set[str]()
            for pd in lowering.pd.walk():
                is_ref = _is_ref(pd)
                # slow code of another primitive is no alternative
                if (is_ref and (node.exact or not is_own)) or _loses_in_sigmoid(node, pd):
                    continue
                impl = _prefix(node, pd.kind, is_own) + pd.impl
                if named not in (None, impl):
                    names.update([] if is_ref else [impl])
                    if len(names) == _IMPLEMENTATIONS:
                        break
                    continue
                candidate = self._candidate(asked, lowering, pd, impl, known)
                # oneDNN names an implementation again where its primitive cache knows an earlier one
                if candidate is None or id(candidate) in seen:
                    continue
                seen.add(id(candidate))
                yield candidate
                optimized += not is_ref
                if optimized == _IMPLEMENTATIONS:
                    break

    def _natives(self, node: Node, request: Request) -> tuple[dict[str, dnnl.NativeDesc], dnnl.PrimitiveAttr] | None:
        """Return a request's descriptors, and the attributes; None if oneDNN cannot express one of them."""

        def made() -> tuple[dict[str, dnnl.NativeDesc], dnnl.PrimitiveAttr]:
            # a slice is told by its pointer: some implementations ignore offset0, others refuse or are slow with it
            natives = {name: dnnl.NativeDesc.from_desc(desc.at_start()) for name, desc in request.items()}
            return natives, self._attributes(node, natives, stored_in(request))

        return _unless_declined(made)

    def _attributes(self, node: Node, natives: Mapping[str, dnnl.NativeDesc], stored: Stored) -> dnnl.PrimitiveAttr:
        if any(post_op.operands for post_op in node.post_ops) or byte_grids(node, stored):
            return _attributes(node, natives, stored)
        key = _tail(node)
        if key not in self._attrs:
            self._attrs[key] = _attributes(node, {}, stored)
        return self._attrs[key]

    def _candidate(
        self, asked: _Asked, lowering: Lowering, pd: dnnl.PrimitiveDesc, impl: str, known: dict[object, Candidate]
    ) -> Candidate | None:
        node, request = asked.node, asked.request
        try:
            formats = dict(lowering.resolve(pd))
            tail = {name: _tail_format(lowering, pd, number, request[name]) for name, number in asked.tail}
        except (FormatError, ShapeError):  # this implementation's formats have no name in the op's dims
            return None
        for name, desc in request.items():
            if desc.kind == "blocked" and name in formats and _is_native_form(formats[name], asked.starts[name]):
                formats[name] = desc
        tail |= asked.slopes
        if known_bad(dnnl.lib().version, node, {**request, **tail, **formats}, impl) is not None:
            return None
        if node.grids and saturates(node, asked.stored, impl, has_vnni=_has_vnni()):
            return None
        if node.residual is not None:
            tail[node.residual] = formats["dst"]
        operands = {name: tail.get(name) or formats[name] for name in asked.operands}
        results = tuple(formats[name] for name in asked.results)
        if self._is_rejected(node, impl, operands, results):
            return None
        identity = (impl, asked.operands, tuple(operands.values()), results)
        if identity not in known:
            # one that is asked for by its name will hardly be left out: its native object is made once
            kept = pd.clone() if asked.is_named else pd.sketch()
            handle = PrimitiveImplementation(kept, OneDnnTarget, is_alone=asked.is_alone)
            known[identity] = Candidate(self.name, impl, operands, results, 0.0, _is_ref(pd), handle)
        return known[identity]

    def _is_rejected(
        self, node: Node, impl: str, operands: Mapping[str, MemoryDesc], results: tuple[MemoryDesc, ...]
    ) -> bool:
        return bool(self._rejected) and _identity(node, impl, operands, results) in self._rejected


@dataclass(frozen=True)
class _Asked:
    """A request, with what all implementations for it have in common."""

    node: Node
    request: Request
    stored: Stored
    #: names of operands and of results
    operands: tuple[str, ...]
    results: tuple[str, ...]
    #: post-ops' operands with the numbers of their arguments, and those of which oneDNN has no descriptor: row-major
    tail: tuple[tuple[str, int], ...]
    slopes: Mapping[str, MemoryDesc]
    #: the formats with the tensors' own beginnings
    starts: Mapping[str, MemoryDesc]
    #: whether one thread computes it
    is_alone: bool
    #: whether one implementation is meant
    is_named: bool


def _asked(node: Node, request: Request, *, is_alone: bool, is_named: bool) -> _Asked:
    names, stored = result_names(node), stored_in(request)
    prelus = [post_op for post_op in node.post_ops if post_op.op == "prelu"]
    slopes = {name: plain(request[name]) for post_op in prelus for name in post_op.operands}
    tail = tuple(pair for pair in tail_arguments(node, stored) if pair[0] not in slopes)
    operands = tuple(name for name in request if name not in names)
    results = tuple(name for name in names if name in request)
    starts = {name: desc.at_start() for name, desc in request.items()}
    return _Asked(node, request, stored, operands, results, tail, slopes, starts, is_alone, is_named)


class _Answers:
    """The candidates of one request, computed as far as they are read, then kept."""

    __slots__ = ("_known", "_source")

    def __init__(self, source: Iterator[Candidate]) -> None:
        self._source = source
        self._known: list[Candidate] = []

    def __iter__(self) -> Iterator[Candidate]:
        index = 0
        while True:
            if index == len(self._known):
                candidate = next(self._source, None)
                if candidate is None:
                    return
                self._known.append(candidate)
            yield self._known[index]
            index += 1


def _lower(
    node: Node, primitive: Primitive, natives: Mapping[str, dnnl.NativeDesc], attr: dnnl.PrimitiveAttr
) -> Lowering | None:
    """Return the primitive's descriptors for a request; None if it or oneDNN declines."""
    return _unless_declined(lambda: primitive(node.attrs, natives, attr))


def _without_formats(problem: dnnl.Problem) -> tuple[object, ...]:
    """Return what a problem is, whatever its formats are."""
    values = (getattr(problem, one.name) for one in fields(problem))
    return type(problem), *(value.dims if isinstance(value, dnnl.NativeDesc) else value for value in values)


def _unless_declined(make: Callable[[], _T | None]) -> _T | None:
    """Return the result of a function; None if the project or oneDNN declines a description in it."""
    try:
        return make()
    except (FormatError, ShapeError, UnsupportedOpError):
        return None
    except DnnlError as error:
        if error.status not in _DECLINED:
            raise
        return None


def _is_native_form(native: MemoryDesc, desc: MemoryDesc) -> bool:
    """Return whether oneDNN is given a format so: a stride without effect may be another one."""
    return native == desc or (native.dims == desc.dims and native == dnnl.NativeDesc.from_desc(desc).desc)


def _kernel_of(node: Node) -> Kernel | None:
    """Return the kernel that can apply a node's last post-op to its result."""
    if not node.post_ops or node.post_ops[-1].op != "eltwise" or len(node.results) != 1:
        return None
    attrs = node.post_ops[-1].attrs.to_json()
    return kernel_for(attrs["alg"], attrs["alpha"], attrs["beta"], node.results[0].dtype)


def _attributes(node: Node, natives: Mapping[str, dnnl.NativeDesc], stored: Stored) -> dnnl.PrimitiveAttr:
    tail = dnnl.PostOps()
    for step in chain_of(node, stored).steps:
        if isinstance(step, Function):
            tail.append_eltwise(f"eltwise_{step.alg}", step.alpha, step.beta)
            continue
        post_op = node.post_ops[step.index]
        form = opdef(post_op.op).as_post_op
        if form is None:
            raise GraphError(f"{node.label}: oneDNN has no post-op {post_op.op!r}")
        operands = [natives[name] for name in post_op.operands]
        form.append(post_op.attrs, tail, operands, stored.get("dst", node.results[0].dtype))
    scaling = scaling_of(node, stored)
    args = {one.name: int(dnnl.Arg[one.declared.arg]) for one in ports(node, {**scaling.masks, **scaling.zeros})}
    masks = {args[name]: mask for name, mask in scaling.masks.items()}
    return dnnl.PrimitiveAttr(tail, masks, dict.fromkeys((args[name] for name in scaling.zeros), 0))


def _has_vnni() -> bool:
    return any(dnnl.lib().includes(isa) for isa in ("avx512_core_vnni", "avx2_vnni"))


def _tail_format(lowering: Lowering, pd: dnnl.PrimitiveDesc, argument: int, asked: MemoryDesc) -> MemoryDesc:
    """Return the format of a post-op's operand: as requested, or oneDNN's choice for `any`."""
    depthwise = argument & dnnl.Arg.ATTR_POST_OP_DW
    if asked.kind != "any" and not depthwise:
        return asked
    native = pd.arg_md(argument)
    if native is None:
        raise UnsupportedOpError(f"{pd.impl} does not tell the format of its post-op's argument {argument}")
    if asked.kind != "any" and native.desc != asked:  # oneDNN chooses these and ignores the request
        raise FormatError(f"{pd.impl} takes its post-op's argument {argument} as {native.desc}, not as {asked}")
    return native.desc if lowering.tail is None else lowering.tail(native.desc, asked.dims)


def _tail(node: Node) -> object:
    """Return post-ops and grids; the scales of weights are arguments."""
    post_ops = tuple((post_op.op, post_op.attrs, post_op.operands) for post_op in node.post_ops)
    if not node.grids:
        return post_ops
    return post_ops, node.grid_forms


def _identity(node: Node, impl: str, operands: Mapping[str, MemoryDesc], results: tuple[MemoryDesc, ...]) -> object:
    """Return an identity that equal primitives share, for any offsets of their tensors."""
    read = tuple((name, operands[name].at_start()) for name in sorted(operands))
    return (node.op, node.attrs, _tail(node), impl, read, tuple(desc.at_start() for desc in results))


def _prefix(node: Node, kind: str, is_own: bool) -> str:
    """Return what stands before the names of a primitive's implementations: the kind of an equivalent one."""
    if not is_own and kind == node.op:
        return f"{EXCHANGED}:"
    # a gradient is of the same kind as its op, and oneDNN has one kind for all recurrent layers
    return "" if node.op.startswith(kind) or kind == "rnn" else f"{kind}:"


def _is_ref(pd: dnnl.PrimitiveDesc) -> bool:
    """Whether oneDNN would run its slow loops."""
    return pd.is_reference or is_loop(pd.impl)


def _loses_in_sigmoid(node: Node, pd: dnnl.PrimitiveDesc) -> bool:
    """Whether a sigmoid behind the node would be oneDNN's plain C++, which makes 0 of NaN; its kernels keep NaN."""
    if not any(getattr(post_op.attrs, "alg", "") == "logistic" for post_op in node.post_ops):
        return False
    is_plain = _is_ref(pd) or pd.impl.startswith(("simple", AS_GRADIENT))
    return is_plain or (pd.kind == "convolution" and pd.impl == "x64:gemm:jit")


KernelImplementation.offered_by = ExpertsImplementation.offered_by = OneDnnTarget
