"""The oneDNN target: asks the C API which formats a node can run in, and keeps the primitive descriptor that answered.

Owns the mapping from a graph node to a primitive descriptor (operands, attributes, post-ops). Must not know how
nodes are ordered, buffered or run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from fmtprop import dnnl
from fmtprop.errors import DnnlError, FormatError, GraphError, ShapeError, UnsupportedOpError
from fmtprop.ir.node import Node
from fmtprop.ir.op import Lowering, OpDef, opdef
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.passes.target import Candidate, Request
from fmtprop.targets.known_bad import known_bad

#: what oneDNN computes in; everything else runs on the reference target
_FLOATING = frozenset({DataType.F32, DataType.BF16, DataType.F16})

#: rough costs of a reorder for comparing choices: seconds per call, bytes per second
_CALL, _BANDWIDTH = 2e-6, 1e10

#: statuses by which oneDNN declines, as opposed to failing
_DECLINED = frozenset({"unimplemented", "invalid_arguments"})


class OneDnnTarget:
    """Candidates from the oneDNN library that is loaded.

    Parameters
    ----------
    prop_kind : str
        ``"forward_inference"`` or ``"forward_training"``.

    Notes
    -----
    Answers are kept by value (op, attributes, post-ops, request), so that equal layers share one primitive descriptor.
    """

    name = "onednn"

    def __init__(self, prop_kind: str = "forward_inference") -> None:
        self.prop_kind = prop_kind
        self._answers: dict[object, _Answers] = {}
        #: (node label, what the library said) for each request that it declined: read by reports and tests
        self.declined: list[tuple[str, str]] = []
        self._rejected: set[object] = set()

    def reject(self, node: Node) -> None:
        """Never offer again the implementation that a formatted node chose: it gave a wrong answer."""
        if node.choice is not None:
            self._rejected.add(_identity(node, node.choice.impl, node.choice.operands, node.descs))
            self._answers.clear()

    def candidates(self, node: Node, request: Request) -> Iterable[Candidate]:
        """Yield every implementation that oneDNN offers for a request, its own order of preference first."""
        key = (node.op, node.attrs, _tail(node), tuple(request.items()))
        if key not in self._answers:
            self._answers[key] = _Answers(self._ask(node, request))
        return self._answers[key]

    def reorder_cost(self, src: MemoryDesc, dst: MemoryDesc) -> float | None:
        """Return a rough time by the bytes moved; None where the destination repeats elements."""
        if src == dst:
            return 0.0
        if dst.has_broadcast:
            return None
        return _CALL + (src.nbytes + dst.nbytes) / _BANDWIDTH

    # ------------------------------------------------------------------ asking

    def _ask(self, node: Node, request: Request) -> Iterator[Candidate]:
        declaration = opdef(node.op)
        if declaration.primitive is None or not _computable(declaration, request):
            return
        try:
            # a slice is told by its pointer: some implementations ignore offset0, others refuse or are slow with it
            natives = {name: dnnl.NativeDesc.from_desc(desc.at_start()) for name, desc in request.items()}
            attr = self._attributes(node, natives)
            lowering = declaration.primitive(node.attrs, natives, attr, self.prop_kind)
        except (FormatError, ShapeError, UnsupportedOpError) as error:
            self.declined.append((node.label, str(error)))
            return
        except DnnlError as error:
            if error.status not in _DECLINED:
                raise
            self.declined.append((node.label, str(error)))
            return
        seen: set[object] = set()
        for pd in lowering.pd.implementations():
            candidate = self._candidate(node, declaration, request, lowering, pd)
            if candidate is None:
                continue
            # oneDNN names an implementation again where its primitive cache knows an earlier one
            identity = (candidate.impl, tuple(candidate.operands.values()), candidate.results)
            if identity not in seen:
                seen.add(identity)
                yield candidate

    def _attributes(self, node: Node, natives: Mapping[str, dnnl.NativeDesc]) -> dnnl.PrimitiveAttr:
        tail = dnnl.PostOps()
        for post_op in node.post_ops:
            attrs = post_op.attrs.to_json()
            if post_op.op == "eltwise":
                tail.append_eltwise(f"eltwise_{attrs['alg']}", attrs["alpha"], attrs["beta"])
            elif post_op.op == "sum":
                tail.append_sum(attrs["scales"][0])
            elif post_op.op == "binary" and post_op.operand is not None:
                tail.append_binary(f"binary_{attrs['alg']}", natives[post_op.operand])
            else:
                raise GraphError(f"{node.label}: oneDNN has no post-op {post_op.op!r}")
        return dnnl.PrimitiveAttr(tail)

    def _candidate(
        self, node: Node, declaration: OpDef, request: Request, lowering: Lowering, pd: dnnl.PrimitiveDesc
    ) -> Candidate | None:
        formats = dict(lowering.resolve(pd))
        for name, desc in request.items():
            if desc.kind == "blocked" and formats.get(name) == desc.at_start():
                formats[name] = desc
        if known_bad(dnnl.lib().version, node, {**request, **formats}, pd.impl) is not None:
            return None
        dst = formats["dst"]
        tail = {}
        for index, post_op in enumerate(node.post_ops):
            if post_op.operand is None:
                continue
            if post_op.op == "sum":
                tail[post_op.operand] = dst
            else:
                tail[post_op.operand] = self._tail_format(pd, index, request[post_op.operand])
        operands = {name: tail.get(name) or formats[name] for name in request if name not in declaration.result_names}
        results = tuple(formats[name] for name in declaration.result_names if name in request)
        if _identity(node, pd.impl, operands, results) in self._rejected:
            return None
        return Candidate(self.name, pd.impl, operands, results, 0.0, _is_ref(pd.impl), pd)

    def _tail_format(self, pd: dnnl.PrimitiveDesc, index: int, asked: MemoryDesc) -> MemoryDesc:
        """Return the format of a binary post-op's operand: as asked, or what oneDNN made of `any`."""
        if asked.kind != "any":
            return asked
        argument = dnnl.Arg.ATTR_MULTIPLE_POST_OP(index) | dnnl.Arg.SRC_1
        native = pd.arg_md(argument)
        if native is None:
            raise UnsupportedOpError(f"{pd.impl} does not tell the format of post-op {index}'s operand")
        # a primitive over rows has views of fewer dimensions
        return native.desc if native.desc.ndim == asked.ndim else native.desc.reshape(asked.dims)


class _Answers:
    """The candidates of one request, computed as far as somebody reads them, then kept."""

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


def _computable(declaration: OpDef, request: Request) -> bool:
    """Whether oneDNN computes in these data types at all; a reorder also converts integers that it knows."""
    types = {desc.dtype for desc in request.values()}
    if declaration.name == "reorder":
        return types <= _FLOATING or (len(types) == 1 and types <= {DataType.S32, DataType.S8, DataType.U8})
    return types <= _FLOATING


def _tail(node: Node) -> object:
    return tuple((post_op.op, post_op.attrs, post_op.operand) for post_op in node.post_ops)


def _identity(node: Node, impl: str, operands: Mapping[str, MemoryDesc], results: tuple[MemoryDesc, ...]) -> object:
    return (node.op, node.attrs, _tail(node), impl, tuple(sorted(operands.items(), key=lambda kv: kv[0])), results)


def _is_ref(impl: str) -> bool:
    return impl.startswith("ref")
