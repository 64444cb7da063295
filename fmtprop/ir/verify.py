"""The graph verifier: numbered rules that a graph must obey at each stage.

Owns the definition of a well-formed graph. The rules on formats are in :mod:`fmtprop.ir.verify_formats`;
``docs/verifier.md`` lists all rules. A rule is a generator of complaints; the verifier raises the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING

from fmtprop.errors import FmtpropError, FormatError, GraphError, ShapeError, VerifyError
from fmtprop.ir import verify_formats as formats
from fmtprop.ir.aliasing import is_view, overwrite_hazard
from fmtprop.ir.initialiser import Initialiser
from fmtprop.ir.node import Into, Node, PostOp
from fmtprop.ir.op import Category, opdef
from fmtprop.ir.plain import attrs_class
from fmtprop.ir.ports import result_names
from fmtprop.ir.post_ops import types_along
from fmtprop.ir.types import TensorType
from fmtprop.layout import DataType, MemoryDesc

if TYPE_CHECKING:
    from fmtprop.ir.graph import Graph

Check = Callable[["Graph"], Iterator[str]]


class Stage(IntEnum):
    """Stage of a graph; every stage has the rules of the stages before it, too."""

    #: from a frontend or a graph file: logical types only
    IMPORTED = 1
    #: rewritten: constants folded, patterns fused to post-ops
    NORMAL = 2
    #: every tensor has a format, every format change is a reorder node
    FORMATTED = 3


@dataclass(frozen=True)
class Rule:
    """One numbered rule."""

    #: ``"V1"``, ``"V2"``, …
    number: str
    stage: Stage
    #: from a graph to its complaints, each naming node, operand and value; its docstring is the rule
    check: Check

    @property
    def text(self) -> str:
        """The rule in words."""
        return " ".join((self.check.__doc__ or "").split())


def verify(graph: Graph, stage: Stage) -> None:
    """Check a graph against every rule of its stage.

    Raises VerifyError if a rule is broken; the message names the rule, the node, the operand and the value.

    >>> from fmtprop.ir import Graph
    >>> verify(Graph("empty"), Stage.IMPORTED)
    Traceback (most recent call last):
    ...
    fmtprop.errors.VerifyError: V4: graph empty has no output; mark one with Graph.output
    """
    _run(graph, tuple(rule for rule in RULES if rule.stage <= stage))


def verify_structure(graph: Graph) -> None:
    """Check only rules V1 to V5: names, operands, results, boundary and order, but neither types nor data.

    Raises VerifyError if a rule is broken.
    """
    _run(graph, _STRUCTURE)


def _run(graph: Graph, rules: tuple[Rule, ...]) -> None:
    for rule in rules:
        for complaint in rule.check(graph):
            raise VerifyError(rule.number, complaint)


# ---------------------------------------------------------------- structure


def known_ops(graph: Graph) -> Iterator[str]:
    """Every node is stored under its own name, its op is declared and its attributes have the op's class."""
    for name, node in graph.entries():
        if node.name != name:
            yield f"{node.label} is stored under the name {name!r}"
        try:
            expected = attrs_class(node.op)
        except GraphError as error:
            yield f"{node.label}: {error}"
        else:
            if isinstance(node.attrs, Into) and node.op == "output":
                if node.attrs.into not in graph or graph.node(node.attrs.into).op != "input":
                    yield f"{node.label}: it is the new content of {node.attrs.into!r}, which is no input"
            elif type(node.attrs) is not expected:
                yield f"{node.label}: attrs must be {expected.__name__}, got {type(node.attrs).__name__}"


def operands_fit(graph: Graph) -> Iterator[str]:
    """Every node reads the operands that its op declares and its post-ops name: none missing, none unknown."""
    for _, node in graph.entries():
        given = set(graph.inputs(node.name))
        if node.agreed is not None and node.agreed.keys() == given:
            continue  # they were found to fit
        for post_op in node.post_ops:
            for name in post_op.operands:
                if name not in given:
                    yield f"{node.label}: operand {name!r} of its {post_op.op} post-op is not connected"
                given.discard(name)
        if node.is_boundary:
            wanted = {"src"} if node.op == "output" else set()
            if given != wanted:
                yield f"{node.label} must have the operands {sorted(wanted)}, not {sorted(given)}"
            continue
        try:
            opdef(node.op).check_operands(sorted(given))
        except GraphError as error:
            yield f"{node.label}: {error}"


def results_exist(graph: Graph) -> Iterator[str]:
    """Every operand reads a result that its producer has."""
    for _, node in graph.entries():
        for operand, value in graph.inputs(node.name).items():
            producer = graph.node(value.node)
            if not 0 <= value.index < len(producer.results):
                yield (
                    f"{node.label}: operand {operand} reads result {value.index} of {producer.label}, "
                    f"which has {len(producer.results)}"
                )


def boundary_complete(graph: Graph) -> Iterator[str]:
    """Every graph has an output; inputs and constants have one result, outputs none, and neither has post-ops."""
    for _, node in graph.entries():
        wanted = 0 if node.op == "output" else 1
        if node.is_boundary and len(node.results) != wanted:
            yield f"{node.label} must have {wanted} results, has {len(node.results)}"
        if not node.is_boundary and not node.results:
            yield f"{node.label} has no result"
        if node.is_boundary and node.post_ops:
            yield f"{node.label} computes nothing, but has the post-op {node.post_ops[0].op}"
    if not graph.output_nodes:
        yield f"graph {graph.name} has no output; mark one with Graph.output"


def acyclic(graph: Graph) -> Iterator[str]:
    """No node depends on itself."""
    try:
        graph.nodes()
    except GraphError as error:
        yield str(error)


# ---------------------------------------------------------------- data and types


def constants_have_data(graph: Graph) -> Iterator[str]:
    """Every constant has data of the type that its node declares; no other node has data."""
    for _, node in graph.entries():
        if node.op == "constant" and node.name not in graph.constants:
            yield f"{node.label} has no data; put a torch tensor or an Initialiser into Graph.constants"
    for name, data in graph.constants.items():
        if name not in graph or graph.node(name).op != "constant":
            yield f"graph {graph.name} has data for {name!r}, which is not a constant"
        elif not isinstance(data, Initialiser):
            yield from _data_complaints(graph.node(name), data)


def _data_complaints(node: Node, data: object) -> Iterator[str]:
    if not hasattr(data, "shape") or not hasattr(data, "dtype"):
        yield f"{node.label}: data must be a torch tensor or an Initialiser, got {type(data).__name__}"
        return
    type_ = node.results[0]
    try:
        dtype = DataType.from_any(data.dtype)
        if dtype is not type_.dtype or data.shape != type_.dims:
            found = TensorType(tuple(data.shape), dtype)
            yield f"{node.label}: data is {found}, but the node declares {type_}"
    except ShapeError as error:
        yield f"{node.label}: {error}"


def types_agree(graph: Graph) -> Iterator[str]:
    """Every recorded result type equals the inferred type, or is f32 if a compute op keeps its accumulator."""
    for node in graph.nodes():
        if node.is_boundary or node.agreed == (types := _operand_types(graph, node)):
            continue
        try:
            _, inferred = types_along(node, types)
        except FmtpropError as error:
            yield f"{node.label}: {error}"
        else:
            recorded = tuple(map(partial(_real, node), result_names(node), node.results))
            if inferred != recorded and not _stores_accumulator(node, inferred):
                yield f"{node.label}: recorded results are {list(node.results)}, inferred are {list(inferred)}"
            else:
                node.agreeing_with(types)


def _stores_accumulator(node: Node, inferred: tuple[TensorType, ...]) -> bool:
    compute = opdef(node.op).category is Category.COMPUTE
    narrow = inferred[0].dtype in (DataType.BF16, DataType.F16)
    return compute and narrow and node.results == (inferred[0].with_dtype(DataType.F32), *inferred[1:])


# ---------------------------------------------------------------- normal form


def post_ops_absorbable(graph: Graph) -> Iterator[str]:
    """Every node can absorb its post-ops; all post-ops but eltwise read an operand that fits dst."""
    for node in graph.nodes():
        if not node.post_ops:
            continue
        types, allowed = _operand_types(graph, node), opdef(node.op).absorbs.kinds
        before, _ = types_along(node, types)
        for post_op, inferred in zip(node.post_ops, before, strict=True):
            dst = inferred.with_dtype(node.results[0].dtype)
            form, declared = opdef(post_op.op).as_post_op, opdef(post_op.op).operands
            if form is None or form.kind not in allowed:
                yield f"{node.label} cannot absorb the post-op {post_op.op}; it can absorb {sorted(allowed)}"
            elif (post_op.operand is None) == (len(declared) > 1 or declared[0].variadic):
                has = "no" if post_op.operand is None else "an"
                yield f"{node.label}: its {post_op.op} post-op has {has} operand"
            elif post_op.bias is not None and all(operand.name != "bias" for operand in declared):
                yield f"{node.label}: its {post_op.op} post-op has a bias, {post_op.bias}; only a convolution has one"
            elif post_op.operand is not None and not _tail_fits(post_op, types[post_op.operand], dst):
                operand = types[post_op.operand]
                yield f"{node.label}: operand {post_op.operand} of its {post_op.op} is {operand}, dst is {dst}"


def _operand_types(graph: Graph, node: Node) -> dict[str, TensorType]:
    types = {name: graph.type_of(value) for name, value in graph.inputs(node.name).items()}
    return {name: _real(node, name, type_) for name, type_ in types.items()} if node.grids else types


def _real(node: Node, name: str, type_: TensorType) -> TensorType:
    """Return the type of the numbers that an operand or result means: reals, for bytes of a grid."""
    grid = node.grids.get(name)
    return type_ if grid is None or type_.dtype is not grid.stored else type_.with_dtype(DataType.F32)


def _tail_fits(post_op: PostOp, operand: TensorType, dst: TensorType) -> bool:
    if post_op.op == "sum":
        return operand == dst
    if post_op.op == "convolution":  # depthwise: one output for each channel
        return operand.dims[:3] == (dst.dims[1], 1, 1)
    return _broadcasts(operand, dst)


def _broadcasts(operand: TensorType, dst: TensorType) -> bool:
    return operand.ndim == dst.ndim and all(a in (1, b) for a, b in zip(operand.dims, dst.dims, strict=True))


def sums_in_place(graph: Graph) -> Iterator[str]:
    """Every node has at most one sum post-op and may overwrite its operand: no boundary, all other readers earlier."""
    for node in graph.nodes():
        sums = [post_op for post_op in node.post_ops if post_op.op == "sum"]
        if len(sums) > 1:
            yield f"{node.label} has {len(sums)} sum post-ops; there is one destination to add to"
        for post_op in sums:
            operand = post_op.operand or ""
            hazard = overwrite_hazard(graph, graph.inputs(node.name)[operand], node.name, operand)
            if hazard:
                yield f"{node.label}: its sum post-op overwrites operand {operand}, but {hazard}"


def no_identities(graph: Graph) -> Iterator[str]:
    """No view returns its source unchanged."""
    for node in graph.nodes():
        if is_view(graph, node.name) and is_identity_view(graph, node):
            yield f"{node.label} returns its source unchanged; remove it"


def is_identity_view(graph: Graph, node: Node) -> bool:
    """Return whether a view's result has its source's dims and the same order of elements."""
    source, result = graph.type_of(graph.inputs(node.name)["src"]), node.results[0]
    if source != result:
        return False
    plain = MemoryDesc(source.dims, source.dtype)
    try:
        return opdef(node.op).view.dst(node.attrs, plain, result) == plain  # type: ignore[union-attr]
    except FormatError:
        return False


#: every rule, in the order of checking; a rule may rely on those before it
RULES: tuple[Rule, ...] = tuple(
    Rule(f"V{number}", stage, check)
    for number, (stage, check) in enumerate(
        (
            (Stage.IMPORTED, known_ops),
            (Stage.IMPORTED, operands_fit),
            (Stage.IMPORTED, results_exist),
            (Stage.IMPORTED, boundary_complete),
            (Stage.IMPORTED, acyclic),
            (Stage.IMPORTED, constants_have_data),
            (Stage.IMPORTED, types_agree),
            (Stage.NORMAL, post_ops_absorbable),
            (Stage.NORMAL, sums_in_place),
            (Stage.NORMAL, no_identities),
            (Stage.FORMATTED, formats.descs_match),
            (Stage.FORMATTED, formats.formats_decided),
            (Stage.FORMATTED, formats.choices_complete),
            (Stage.FORMATTED, formats.read_as_stored),
            (Stage.FORMATTED, formats.views_follow),
            (Stage.FORMATTED, formats.boundary_plain),
            (Stage.FORMATTED, formats.reorders_needed),
            (Stage.FORMATTED, formats.sums_share_format),
            (Stage.FORMATTED, formats.parts_follow),
            (Stage.FORMATTED, formats.bytes_have_grids),
        ),
        start=1,
    )
)
_STRUCTURE = RULES[:5]
