"""Normalisation of an imported graph, and release of the memory that earlier stages used.

Owns the list of passes before format assignment. :mod:`fmtprop.compiling.compilation` makes and checks plans.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import replace

from fmtprop import dnnl
from fmtprop.compiling.options import Options
from fmtprop.errors import UnsupportedOpError
from fmtprop.ir import Graph, Value
from fmtprop.ir.aliasing import is_view
from fmtprop.ir.footprint import weights_nbytes
from fmtprop.ir.initialiser import Initialiser
from fmtprop.ir.tensors import defer
from fmtprop.ir.verify import Stage
from fmtprop.layout import DataType
from fmtprop.passes.base import Observer, Pass, Pipeline
from fmtprop.passes.pipeline import NORMALISE
from fmtprop.passes.precision.centred_weights import CentredWeights
from fmtprop.passes.precision.compress_embeddings import CompressEmbeddings
from fmtprop.passes.precision.compress_weights import BITS, CompressWeights
from fmtprop.passes.precision.decode_weights import DecodeWeights
from fmtprop.passes.precision.keep_float import KeepFloat
from fmtprop.passes.precision.keep_scores import KeepScores
from fmtprop.passes.precision.lower import LowerPrecision, WidenPrecision
from fmtprop.passes.precision.mark_exact import MarkExact
from fmtprop.passes.precision.pair_quantization import PairQuantization
from fmtprop.passes.rewrites.fold_constants import FoldConstants
from fmtprop.passes.rewrites.fuse_post_ops import FusePostOps
from fmtprop.passes.rewrites.recognise_functions import RecogniseFunctions
from fmtprop.system.collector import collect_young
from fmtprop.targets import OneDnnTarget
from fmtprop.targets.executable import Provider
from fmtprop.targets.memory import check_fits

#: with more weights, memory is returned to the system between stages, which takes a quarter of a second
_LARGE_NBYTES = 64 << 20


def normalise(
    graph: Graph,
    dtype: str = "f32",
    observer: Observer | None = None,
    *,
    target: Provider | None = None,
    special_values: str = "fast",
    weights: str | None = None,
    embeddings: str | None = None,
    keep_float: tuple[str, ...] = (),
    like: Graph | None = None,
    fused: dict[object, bool] | None = None,
    idle: Collection[str] = (),
) -> tuple[Graph, str]:
    """Bring an imported graph to normal form.

    `keep_float`: patterns of the nodes that read numbers without their roundings. `like`: the formatted graph of
    another shape of the model. `fused`: what the target said about fusions for any shape, to which this one's answers
    are added. `idle`: names of passes to leave out. Raises PassError if a pass failed, or its result
    breaks a rule; UnsupportedOpError if the target has no f16 on this CPU; OptionError if a pattern of `keep_float` is
    of no quantized node.
    """
    target = target or OneDnnTarget()
    real = _computed_in(target, dtype)
    passes = tuple(one for one in _passes(target, special_values, keep_float, like, fused) if one.name not in idle)
    if embeddings is not None:
        graph = CompressEmbeddings(BITS[embeddings]).run(graph)
        if observer is not None:
            observer(CompressEmbeddings.name, graph)
    normal = Pipeline(passes, Stage.NORMAL, like is not None).run(graph, observer)
    if weights is not None:
        normal = CompressWeights(BITS[weights]).run(normal)
        if observer is not None:
            observer(CompressWeights.name, normal)
    return DecodeWeights(target, DataType(real)).run(_lowered(normal, real, observer)), real


def with_codes(graph: Graph, weights: str | None) -> Graph:
    """Return an imported graph whose large weights are codes: whoever runs it computes with the same numbers.

    Raises OptionError if there are no such codes.
    """
    weights = Options(weights=weights).weights
    return graph if weights is None else CompressWeights(BITS[weights]).run(FoldConstants().run(defer(graph)))


def quantized_form(graph: Graph, target: Provider | None = None) -> Graph:
    """Return an imported graph with its roundings as nodes, as ``keep_float`` finds them."""
    passes = [_asking(one, target or OneDnnTarget()) for one in NORMALISE]
    return Pipeline((*passes[: _after_pairs(passes)], FoldConstants()), Stage.IMPORTED).run(defer(graph))


def _after_pairs(passes: Sequence[Pass]) -> int:
    return 1 + next(place for place, one in enumerate(passes) if isinstance(one, PairQuantization))


def _lowered(graph: Graph, dtype: str, observer: Observer | None) -> Graph:
    """Return a normal graph in a data type that the target computes in."""
    if dtype == "f32":
        return graph
    lowered = KeepScores().run(LowerPrecision(DataType(dtype)).run(graph))
    if observer is not None:
        observer(LowerPrecision.name, lowered)
    return lowered


def check_f16(target: Provider, dtype: str) -> None:
    """Refuse f16 where a target lacks it; bf16 has the range of f32, which takes its place there."""
    if dtype == "f16" and not target.computes_in(DataType.F16):
        raise UnsupportedOpError(f"{_missing(target, dtype)}: give dtype='bf16' or dtype='f32'")


def _computed_in(target: Provider, dtype: str) -> str:
    """Return the data type in which a target computes, f32 in place of bf16, with a warning."""
    check_f16(target, dtype)
    if dtype == "f32" or target.computes_in(DataType(dtype)):
        return dtype
    warnings.warn(f"{_missing(target, dtype)}: compute-intensive ops run in f32 instead", RuntimeWarning, stacklevel=6)
    return "f32"


def _missing(target: Provider, dtype: str) -> str:
    return f"target {target.name} has no {dtype} on this CPU ({target.describe()['isa']})"


def _passes(
    target: Provider,
    special_values: str,
    keep_float: tuple[str, ...],
    like: Graph | None,
    fused: dict[object, bool] | None,
) -> tuple[Pass, ...]:
    """Return the passes; two of them ask the target."""
    passes = [_asking(one, target, like, fused) for one in NORMALISE]
    if special_values != "fast":
        # a function and its decomposed forms treat infinities differently
        passes = [one for one in passes if not isinstance(one, RecogniseFunctions)]
        passes = [MarkExact(everything=True) if isinstance(one, MarkExact) else one for one in passes]
    if keep_float:
        passes.insert(_after_pairs(passes), KeepFloat(keep_float))
    return tuple(passes)


def _asking(one: Pass, target: Provider, like: Graph | None = None, fused: dict[object, bool] | None = None) -> Pass:
    """Return a pass, with its target if it asks one."""
    if isinstance(one, WidenPrecision):
        return replace(one, target=target)
    if isinstance(one, CentredWeights):
        return replace(one, target=target)
    answers = {} if fused is None else fused
    return replace(one, target=target, like=like, answers=answers) if isinstance(one, FusePostOps) else one


def check_memory(graph: Graph) -> None:
    """Refuse a model that is too large for this machine, before its numbers are drawn or read.

    Raises PlanError if its weights, inputs and outputs need too much memory, or its weights and one of its nodes do.
    """
    weights = {}
    for node in graph.nodes():
        if node.op == "constant":
            type_, data = node.results[0], graph.constants.get(node.name)
            # shared data of several constants is packed once
            weights[type_, data if isinstance(data, Initialiser) else id(data)] = type_.nbytes
    boundary = sum(node.results[0].nbytes for node in graph.input_nodes)
    boundary += sum(graph.type_of(graph.inputs(node.name)["src"]).nbytes for node in graph.output_nodes)
    check_fits(sum(weights.values()) + max(boundary, _worked_on_nbytes(graph)), f"model {graph.name}")


def _worked_on_nbytes(graph: Graph) -> int:
    """Return the most bytes that a node reads and writes, without constants (counted elsewhere) and views."""
    most, sizes = 0, dict[Value, int]()
    for node in graph.nodes():
        is_free = node.op == "constant" or is_view(graph, node.name)
        made = 0
        for index, type_ in enumerate(node.results):
            sizes[Value(node.name, index)] = size = 0 if is_free else type_.nbytes
            made += size
        most = max(most, made + sum(sizes[value] for value in set(graph.inputs(node.name).values())))
    return most


def make_room(graph: Graph) -> None:
    """Return the memory of earlier stages to the system, if the model is large."""
    if weights_nbytes(graph) > _LARGE_NBYTES:
        collect_young()
        dnnl.trim_heap()
