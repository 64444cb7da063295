"""Products of few rows read their matrix where it is, without a copy."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from fmtprop.ir import Graph, Node, Value
from fmtprop.ops import Binary, Concat, Expand, MatMul, Permute, Reshape
from fmtprop.passes.base import NodePass
from fmtprop.passes.editing import bypass, insert, only_reader, shown, window

#: a product of more rows reads its matrix several times, so a copy may pay
_MOST_ROWS = 16

#: fewest bytes of a matrix of which the copy takes longer than the additional products
_LEAST_NBYTES = 1 << 16


@dataclass(frozen=True)
class FewRows(NodePass):
    """Multiply by the parts of a matrix that is put together, and by a repeated matrix once.

    A decoder's step joins the keys and values of a thousand tokens with those of the next one, repeats them for each
    head, and reads the result once. It reads them where the caller has them if each part has a product of its own
    (results are joined or added), and if the rows of all heads that share keys become rows of one product.

    Requires a graph before fusion. Ensures that no product of few rows is the only reader of a large concat of inputs
    or constants, or of a matrix that is repeated along a batch axis, with or without a permutation between them.
    """

    def _visit(self, graph: Graph, node: Node) -> None:
        if not is_of_few_rows(node) or node.post_ops or "bias" in graph.inputs(node.name):
            return
        product, view, made = _with_matrix(graph, node)
        product, view, made = _with_matrix(graph, _grouped(graph, product, view, made))
        if _is_copied(graph, product, view, made):
            _split(graph, product, view, made)


def is_of_few_rows(node: Node) -> bool:
    """Return whether a node is a matrix product of so few rows that reading its matrix takes most of its time."""
    return isinstance(node.attrs, MatMul) and node.results[0].dims[-2] <= _MOST_ROWS


def _with_matrix(graph: Graph, product: Node) -> tuple[Node, Permute | None, Node]:
    """Return a product, the node that makes its matrix, and the permutation between them."""
    made = graph.node(graph.inputs(product.name)["weights"].node)
    if isinstance(made.attrs, Permute) and only_reader(graph, Value(made.name)) == product:
        return product, made.attrs, graph.node(graph.inputs(made.name)["src"].node)
    return product, None, made


def _viewed(graph: Graph, product: Node, view: Permute | None, matrix: Value) -> Value:
    """Add the permutation of a matrix."""
    return matrix if view is None else insert(graph, product, view, src=matrix)


# ---------------------------------------------------------------- repeated matrices


def _grouped(graph: Graph, product: Node, view: Permute | None, merged: Node) -> Node:
    """Replace a product with a repeated matrix by one of more rows, and return this; return any other as it is."""
    matrix = repeated_matrix(graph, merged)
    dst, keeps_batch = product.results[0], view is None or view.order[:-2] == tuple(range(len(view.order) - 2))
    if matrix is None or not keeps_batch or dst.ndim != merged.results[0].ndim:
        return product
    batch = graph.type_of(matrix).dims[:-2]
    src = graph.inputs(product.name)["src"]
    if graph.type_of(src).dims[:-2] != dst.dims[:-2] or dst.dims[:-2] != merged.results[0].dims[:-2]:
        return product
    rows = dst.dims[-2] * (dst.dims[-3] // batch[-1])
    several = insert(graph, product, Reshape((*batch, rows, graph.type_of(src).dims[-1])), src=src)
    grouped = insert(graph, product, MatMul(), src=several, weights=_viewed(graph, product, view, matrix))
    bypass(graph, product, [insert(graph, product, Reshape(dst.dims), src=grouped)])
    return graph.node(grouped.node)


def repeated_matrix(graph: Graph, merged: Node) -> Value | None:
    """Return the matrix of which a reshape is a repetition for consecutive items of the last batch axis."""
    if not isinstance(merged.attrs, Reshape):
        return None
    expanded = graph.node(graph.inputs(merged.name)["src"].node)
    if not isinstance(expanded.attrs, Expand) or expanded.results[0].ndim < 4:  # a batch, groups, rows, columns
        return None
    unsqueezed, dims = graph.inputs(expanded.name)["src"], expanded.results[0].dims
    *batch, groups, rows, columns = dims
    source = graph.node(unsqueezed.node)
    if graph.type_of(unsqueezed).dims != (*batch, 1, rows, columns) or not isinstance(source.attrs, Reshape):
        return None
    matrix = graph.inputs(source.name)["src"]
    is_merged = 0 not in dims and merged.results[0].dims == (*batch[:-1], batch[-1] * groups, rows, columns)
    return matrix if is_merged and graph.type_of(matrix).dims == (*batch, rows, columns) else None


# ---------------------------------------------------------------- joined matrices


def _is_copied(graph: Graph, product: Node, view: Permute | None, concat: Node) -> bool:
    """Return whether a concat exists for one product, and copies much that exists before the run."""
    if not isinstance(concat.attrs, Concat) or graph.reader_count(Value(concat.name)) > 1:
        return False
    if concat.results[0].ndim != product.results[0].ndim or _axis(concat.attrs, view) < concat.results[0].ndim - 2:
        return False
    sources = graph.inputs(concat.name).values()
    copied = (graph.type_of(one).nbytes for one in sources if shown(graph, one).op in ("input", "constant"))
    return sum(copied) >= _LEAST_NBYTES and all(graph.type_of(one).size for one in sources)


def _axis(attrs: Concat, view: Permute | None) -> int:
    """Return the axis of the matrix along which its parts follow one another."""
    return attrs.axis if view is None else view.order.index(attrs.axis)


def _split(graph: Graph, product: Node, view: Permute | None, concat: Node) -> None:
    """Replace a product by those with the parts of its matrix."""
    assert isinstance(concat.attrs, Concat)
    src, axis = graph.inputs(product.name)["src"], _axis(concat.attrs, view)
    is_columns = axis == product.results[0].ndim - 1
    sources = graph.inputs(concat.name)
    parts = [_viewed(graph, product, view, sources[f"src_{i}"]) for i in range(len(sources))]
    sizes = [graph.type_of(part).dims[axis] for part in parts]
    results = []
    for part, start, size in zip(parts, accumulate(sizes[:-1], initial=0), sizes, strict=True):
        read = src if is_columns else window(graph, product, src, -1, start, size)
        results.append(insert(graph, product, MatMul(), src=read, weights=part))
    if is_columns:
        whole = insert(graph, product, Concat(axis), **{f"src_{i}": one for i, one in enumerate(results)})
    else:
        whole, *others = results
        for other in others:
            whole = insert(graph, product, Binary("add"), src_0=whole, src_1=other)
    bypass(graph, product, [whole])
