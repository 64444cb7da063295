"""Verifier rules of a formatted graph: every tensor has a format and every change of format is a reorder node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fmtprop.errors import FmtpropError
from fmtprop.ir.aliasing import is_in_place, is_view, parts_of
from fmtprop.ir.op import opdef
from fmtprop.ir.ports import result_names
from fmtprop.layout import FormatKind

if TYPE_CHECKING:
    from fmtprop.ir.graph import Graph


def descs_match(graph: Graph) -> Iterator[str]:
    """Every node has one memory descriptor per result, of the result's dims and data type."""
    for node in graph.nodes():
        if len(node.descs) != len(node.results):
            yield f"{node.label} has {len(node.descs)} descriptors for {len(node.results)} results"
        for index, (desc, type_) in enumerate(zip(node.descs, node.results, strict=False)):
            if desc.dims != type_.dims or desc.dtype is not type_.dtype:
                yield f"{node.label}: result {index} is {type_}, its descriptor is {desc}"


def formats_decided(graph: Graph) -> Iterator[str]:
    """No descriptor is `any`: each format is decided."""
    for node in graph.nodes():
        read = node.choice.operands if node.choice else {}
        for name, desc in read.items():
            if desc.kind is FormatKind.ANY:
                yield f"{node.label}: the format of operand {name} is still any"
        for index, desc in enumerate(node.descs):
            if desc.kind is FormatKind.ANY:
                yield f"{node.label}: the format of result {index} is still any"


def choices_complete(graph: Graph) -> Iterator[str]:
    """Every computing node records its choice: how it runs, and the format of each operand."""
    for node in graph.nodes():
        if node.is_boundary:
            continue
        if node.choice is None:
            yield f"{node.label} has no choice of how to run"
            continue
        read, given = set(graph.inputs(node.name)), set(node.choice.operands)
        if read != given:
            yield f"{node.label} reads {sorted(read)}, but its choice names formats of {sorted(given)}"


def read_as_stored(graph: Graph) -> Iterator[str]:
    """Every operand is read in the format of its value: each change of format is a reorder node."""
    for node in graph.nodes():
        expected = node.choice.operands if node.choice else {}
        for operand, value in graph.inputs(node.name).items():
            stored = graph.desc_of(value)
            if operand in expected and expected[operand] != stored:
                yield f"{node.label} reads {operand} as {expected[operand]}, but {value} is stored as {stored}"


def views_follow(graph: Graph) -> Iterator[str]:
    """Every view's descriptor is its source's, transformed by the op's view rule."""
    for node in graph.nodes():
        if not is_view(graph, node.name):
            continue
        source = graph.desc_of(graph.inputs(node.name)["src"])
        try:
            expected = opdef(node.op).view.dst(node.attrs, source, node.results[0])  # type: ignore[union-attr]
        except FmtpropError as error:
            yield f"{node.label} cannot be a view of {source}: {error}; a reorder must come first"
        else:
            if node.descs[0] != expected:
                yield f"{node.label} is stored as {node.descs[0]}, but as a view of {source} it is {expected}"


def boundary_plain(graph: Graph) -> Iterator[str]:
    """Every output of the graph is plain: strides without blocks."""
    for node in graph.output_nodes:
        desc = graph.desc_of(graph.inputs(node.name)["src"])
        if not desc.is_plain:
            yield f"{node.label} is stored as {desc}, which is not plain"


def reorders_needed(graph: Graph) -> Iterator[str]:
    """Every reorder keeps the dims and changes the format or the data type."""
    for node in graph.nodes():
        if node.op != "reorder":
            continue
        source, result = graph.desc_of(graph.inputs(node.name)["src"]), node.descs[0]
        if source.dims != result.dims:
            yield f"{node.label} changes dims {source.dims} to {result.dims}"
        elif source == result:
            yield f"{node.label} changes nothing: source and destination are {source}"


def sums_share_format(graph: Graph) -> Iterator[str]:
    """Every sum post-op's operand has the descriptor of dst: both are one buffer."""
    for node in graph.nodes():
        if node.residual is not None:
            desc = graph.desc_of(graph.inputs(node.name)[node.residual])
            if desc != node.descs[0]:
                yield f"{node.label}: operand {node.residual} of its sum is {desc}, dst is {node.descs[0]}"


def parts_follow(graph: Graph) -> Iterator[str]:
    """Every node that moves no data is a view, or a concat with all sources as dense parts of dst."""
    for node in graph.nodes():
        if node.is_boundary or node.choice is None or node.choice.target != "view" or is_view(graph, node.name):
            continue
        if not is_in_place(node):
            yield f"{node.label} computes, so it cannot be run as a view; a target must run it"
            continue
        parts = parts_of(graph, node)
        if parts is None:
            yield (
                f"{node.label} cannot be in place: its result is {node.descs[0]}, where its sources are not dense; "
                "let a target join them"
            )
            continue
        for operand, part in parts.items():
            desc = node.choice.operands[operand]
            if desc != part and desc.at_start() != part.at_start():
                yield (
                    f"{node.label} is in place, but operand {operand} is {desc}; as a part of {node.descs[0]} it is "
                    f"{part.at_start()}; a reorder must come first"
                )


def bytes_have_grids(graph: Graph) -> Iterator[str]:
    """Every tensor on a grid has the same one for its producer and its readers, and as bytes it has the grid's type."""
    for node in graph.nodes():
        for operand, value in graph.inputs(node.name).items() if node.grids else ():
            producer, grid = graph.node(value.node), node.grids.get(operand)
            if grid is None:
                continue
            made = producer.grids.get("dst" if producer.is_boundary else result_names(producer)[value.index])
            if made != grid:
                yield f"{node.label}: operand {operand} lies on {grid}, but {producer.label} makes it on {made}"
            dtype = graph.type_of(value).dtype
            if not dtype.is_floating and dtype is not grid.stored:
                yield f"{node.label}: operand {operand} is stored as {dtype}, its grid as {grid.stored}"
