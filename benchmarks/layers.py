"""Where the time of a model goes, layer by layer, in fmtprop and in other runtimes, under names that can be compared.

Owns how each runtime's own profile is read, and what its layers are called here: a *kind* of work and the dimensions
of its first result, ones left out, since runtimes differ in fusions and names but not in these. OpenVINO's
``Subgraph`` counts as pointwise, which is what it mostly is; in a transformer there may be a whole attention in it.
Profiling slows a runtime down a little, and differently: for whole models, race them.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fmtprop.api import CompiledModel, Options, compile_graph
from fmtprop.bench.peers import require
from fmtprop.capture import load
from fmtprop.runtime.process import use_threads

__all__ = ["Group", "Layer", "compare_layers", "prepare_fmtprop", "prepare_onnxruntime", "prepare_openvino"]

#: kind -> what fmtprop, OpenVINO and ONNX Runtime call it
_KINDS = {
    "convolution": ("convolution", "deconvolution", "GroupConvolution", "Conv", "FusedConv", "ConvTranspose"),
    "product": (
        *("inner_product", "matmul", "FullyConnected", "Gemm", "FusedGemm", "FusedMatMul"),
        *("Attention", "MultiHeadAttention", "ScaledDotProductAttention", "ScaledDotProductAttentionWithKVCache"),
    ),
    "copy": (
        *("reorder", "shuffle", "slice", "Transpose", "ShuffleChannels", "ReorderInput", "ReorderOutput", "Split"),
        *("VariadicSplit", "StridedSlice", "Reshape", "Squeeze", "Unsqueeze"),
    ),
    "concat": ("Concatenation",),
    "pooling": (
        *("reduction", "MaxPool", "AvgPool", "AveragePool", "GlobalAveragePool", "Reduce", "ReduceMean"),
        *("AdaptiveAvgPool",),
    ),
    "normalization": (
        *("layer_normalization", "batch_normalization", "group_normalization", "MVN", "LayerNormalization"),
        *("SkipLayerNormalization", "RMS", "RMSNorm"),
    ),
    "pointwise": (
        *("eltwise", "binary", "sum", "prelu", "Subgraph", "Add", "Multiply", "Mul", "Sigmoid", "Gelu", "BiasGelu"),
        *("HardSigmoid", "Swish", "QuickGelu", "Relu", "Clip", "Clamp", "Div", "Sub", "Erf"),
    ),
    "lookup": ("aten", "Gather", "EmbeddingBag"),
}
_KIND_OF = {name.lower(): kind for kind, names in _KINDS.items() for name in names}


@dataclass(frozen=True)
class Layer:
    """One thing that a runtime executes."""

    #: what kind of work it is: ``"convolution"``, ``"product"``, ``"copy"``…, or the runtime's own word
    kind: str
    #: dimensions of its first result without those of size 1
    dims: tuple[int, ...]
    impl: str
    milliseconds: float

    @classmethod
    def of(cls, name: str, dims: Iterable[int], impl: str, milliseconds: float) -> Layer:
        """Describe a layer by the runtime's name of its op.

        >>> Layer.of("FullyConnected", (1, 128, 768), "brgemm", 0.5)
        Layer(kind='product', dims=(128, 768), impl='brgemm', milliseconds=0.5)
        """
        kind = _KIND_OF.get(name.lower(), name.lower())
        return cls(kind, tuple(size for size in dims if size != 1), impl, milliseconds)


@dataclass(frozen=True)
class Group:
    """Layers of one kind and size, in every runtime."""

    kind: str
    #: the size; empty where layers of all sizes are together
    dims: tuple[int, ...]
    milliseconds: Mapping[str, float]
    counts: Mapping[str, int]
    #: names of the implementations by runtime, those that take most time first
    impls: Mapping[str, str]


def compare_layers(profiles: Mapping[str, Sequence[Layer]], *, by_size: bool = True) -> list[Group]:
    """Put the layers of runtimes side by side.

    `profiles`: by runtime; the first is ours. `by_size`: whether layers of one kind are separated by size. Result:
    those where the first runtime loses most to the fastest of the others come first.

    >>> ours = [Layer("product", (8,), "gemm", 3.0), Layer("product", (4,), "gemm", 1.0)]
    >>> for group in compare_layers({"us": ours, "them": [Layer("product", (4,), "brgemm", 0.5)]}):
    ...     print(group.dims, group.milliseconds, group.counts)
    (8,) {'us': 3.0, 'them': 0.0} {'us': 1, 'them': 0}
    (4,) {'us': 1.0, 'them': 0.5} {'us': 1, 'them': 1}
    """
    first, *others = profiles
    found: dict[tuple[str, tuple[int, ...]], dict[str, list[Layer]]] = defaultdict(lambda: {r: [] for r in profiles})
    for runtime, layers in profiles.items():
        for layer in layers:
            found[layer.kind, layer.dims if by_size else ()][runtime].append(layer)
    groups = [
        Group(
            kind,
            dims,
            {runtime: sum((layer.milliseconds for layer in layers), 0.0) for runtime, layers in sides.items()},
            {runtime: len(layers) for runtime, layers in sides.items()},
            {runtime: _impls(layers) for runtime, layers in sides.items()},
        )
        for (kind, dims), sides in found.items()
    ]
    return sorted(groups, key=lambda g: min((g.milliseconds[r] for r in others), default=0.0) - g.milliseconds[first])


# ---------------------------------------------------------------- profiles, each in a process of its own


def prepare_fmtprop(folder: Path, options: Options, threads: int, runs: int) -> Callable[[], list[Layer]]:
    """Compile ``graph.json`` of a folder; return what profiles it on ``inputs.pt``."""
    use_threads(threads)
    net = compile_graph(load(folder / "graph.json"), options)
    return partial(_profile_fmtprop, net, torch.load(folder / "inputs.pt", weights_only=True), runs)


def prepare_openvino(folder: Path, onnx: Path, precision: str, threads: int, runs: int) -> Callable[[], list[Layer]]:
    """Compile an ONNX file; return what profiles it on ``inputs.pt`` of a folder."""
    ov = require("openvino", "openvino")
    core = ov.Core()
    config = {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": precision,
        "PERF_COUNT": True,
    }
    compiled = core.compile_model(core.read_model(str(onnx)), "CPU", config)
    dims = {
        op.friendly_name: tuple(op.get_output_shape(0)) if op.get_output_size() else ()
        for op in compiled.get_runtime_model().get_ordered_ops()
    }
    inputs = [tensor.numpy() for tensor in torch.load(folder / "inputs.pt", weights_only=True)]
    return partial(_profile_openvino, compiled.create_infer_request(), inputs, dims, runs)


def prepare_onnxruntime(folder: Path, onnx: Path, threads: int, runs: int) -> Callable[[], list[Layer]]:
    """Return what profiles an ONNX file on ``inputs.pt`` of a folder."""
    inputs = [tensor.numpy() for tensor in torch.load(folder / "inputs.pt", weights_only=True)]
    return partial(_profile_onnxruntime, onnx, inputs, threads, runs)


def _profile_fmtprop(net: CompiledModel, inputs: Sequence[torch.Tensor], runs: int) -> list[Layer]:
    seconds = net.profile(*inputs, repeats=runs)
    steps = [(step.node, step.node.choice) for step in net.plan.steps]
    return [
        Layer.of(node.op, node.results[0].dims, choice.impl if choice else "", 1e3 * time)
        for (node, choice), time in zip(steps, seconds, strict=True)
    ]


def _profile_openvino(
    request: Any, inputs: Sequence[Any], dims: Mapping[str, tuple[int, ...]], runs: int
) -> list[Layer]:
    times: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for run in range(runs + 2):
        request.infer(inputs)
        if run < 2:
            continue
        for one in request.profiling_info:
            if one.status.name == "EXECUTED":
                times[one.node_name, one.node_type, one.exec_type].append(one.real_time.total_seconds() * 1e3)
    return [Layer.of(kind, dims.get(name, ()), impl, median(ms)) for (name, kind, impl), ms in times.items()]


def _profile_onnxruntime(onnx: Path, inputs: Sequence[Any], threads: int, runs: int) -> list[Layer]:
    ort = require("onnxruntime", "onnxruntime")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.enable_profiling = True
    with tempfile.TemporaryDirectory(prefix="fmtprop-") as folder:
        options.profile_file_prefix = str(Path(folder) / "profile")
        session = ort.InferenceSession(str(onnx), options, providers=["CPUExecutionProvider"])
        feed = {argument.name: array for argument, array in zip(session.get_inputs(), inputs, strict=True)}
        for _ in range(runs + 2):
            session.run(None, feed)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    return read_onnxruntime(events)


def read_onnxruntime(events: Iterable[Mapping[str, Any]]) -> list[Layer]:
    """Return the layers in the events of ONNX Runtime's profile; its first two runs do not count."""
    times: dict[tuple[str, str, tuple[int, ...]], list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            arguments = event["args"]
            shapes = [dims for entry in arguments["output_type_shape"] for dims in entry.values()]
            times[event["name"], arguments["op_name"], tuple(shapes[0]) if shapes else ()].append(event["dur"] / 1e3)
    return [Layer.of(op, dims, op, median(ms[2:] or ms)) for (_, op, dims), ms in times.items()]


def _impls(layers: Sequence[Layer]) -> str:
    time: dict[str, float] = defaultdict(float)
    for layer in layers:
        time[layer.impl] += layer.milliseconds
    return ", ".join(sorted(time, key=lambda impl: -time[impl]))
