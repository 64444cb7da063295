"""Creation of primitive descriptors: only this module calls ``*_primitive_desc_create``.

Owns the translation of a refusal into an error, with the benchdnn command line that reproduces it.

References
----------
oneDNN, tests/benchdnn/doc (``driver_*.md``, ``knobs_attr.md``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import byref
from typing import Any, NamedTuple

from fmtprop.dnnl import _abi
from fmtprop.dnnl.attr import PostOp, PrimitiveAttr
from fmtprop.dnnl.desc import NativeDesc, layout_name
from fmtprop.dnnl.enums import NormFlags
from fmtprop.dnnl.handle import Handle
from fmtprop.dnnl.kinds import Problem
from fmtprop.dnnl.library import lib, raise_status, status_name
from fmtprop.dnnl.specs import c_call
from fmtprop.system.locks import ProcessLock

_NORM_FLAGS = {
    NormFlags.USE_GLOBAL_STATS: "G",
    NormFlags.USE_SCALE: "C",
    NormFlags.USE_SHIFT: "H",
    NormFlags.FUSE_NORM_RELU: "R",
    NormFlags.FUSE_NORM_ADD_RELU: "A",
}
_ALGORITHMS = {
    "convolution_winograd": "wino",
    "deconvolution_winograd": "wino",
    "pooling_avg_include_padding": "avg_p",
    "pooling_avg_exclude_padding": "avg_np",
    "lrn_across_channels": "ACROSS",
    "lrn_within_channel": "WITHIN",
    "softmax_accurate": "SOFTMAX",
    "softmax_log": "LOGSOFTMAX",
}
_DIRECTIONS = {
    "forward_inference": "FWD_I",
    "forward_training": "FWD_D",
    "backward_data": "BWD_D",
    "backward_weights": "BWD_W",
    "backward": "BWD_DW",
}

_ROWS = "{dir} --dt={src.type} --tag={src.tag}"
_PRODUCT = "--dt={src.type}:{weights.type}:{dst.type} --stag={src.tag} --wtag={weights.tag} --dtag={dst.tag}"
_WEIGHTED = f"{{dir}} {_PRODUCT}"
_COPY = "--sdt={src.type} --ddt={dst.type} --stag={src.tag} --dtag={dst.tag}"
_CHANNELS = "mb{src.batch}ic{src.channels}"

# Kind -> driver, options, and problem. A tensor has type, tag, dims and parts of these. src and dst mean their
# gradients if only these are given. Other words are in `_WORDS`, or are parameters of the problem.
_LINES = {
    "convolution": f"--conv {_WEIGHTED} {{alg}} | {{groups}}{_CHANNELS}oc{{dst.channels}}{{window}}",
    "deconvolution": f"--deconv {_WEIGHTED} {{alg}} | {{groups}}{_CHANNELS}oc{{dst.channels}}{{window}}",
    "inner_product": f"--ip {_WEIGHTED} | {_CHANNELS}oc{{dst.channels}}{{src.spatial}}",
    "matmul": f"--matmul {_PRODUCT} {{bias}} | {{src.dims}}:{{weights.dims}}",
    "pooling": f"--pool {{dir}} --dt={{src.type}}:{{dst.type}} --tag={{src.tag}} {{alg}} | {_CHANNELS}{{window}}",
    "lrn": f"--lrn {_ROWS} {{alg}} | {_CHANNELS}{{src.spatial}}ls{{local_size}}alpha{{alpha:g}}beta{{beta:g}}k{{k:g}}",
    "batch_normalization": f"--bnorm {_ROWS} {{flags}} | {_CHANNELS}{{src.spatial}}eps{{epsilon:g}}",
    "group_normalization": f"--gnorm {_ROWS} {{flags}} | g{{groups}}{_CHANNELS}{{src.spatial}}eps{{epsilon:g}}",
    "layer_normalization": "--lnorm {dir} --dt={src.type}:{dst.type} --tag={src.tag}:{dst.tag} {flags} {stat} "
    "| {src.dims}",
    "eltwise": "--eltwise {dir} --dt={data.type} --tag={data.tag} {alg} --alpha={alpha:g} --beta={beta:g} "
    "| {data.dims}",
    "prelu": "--prelu {dir} --sdt={src.type}:{weights.type} --stag={src.tag}:{weights.tag} | {src.dims}:{weights.dims}",
    "softmax": f"--softmax {{dir}} {_COPY} {{alg}} --axis={{axis}} | {{dst.dims}}",
    "shuffle": f"--shuffle {_ROWS} --axis={{axis}} --group={{group_size}} | {{src.dims}}",
    "resampling": "--resampling {dir} --sdt={src.type} --ddt={dst.type} --tag={src.tag} {alg} | "
    f"{_CHANNELS}{{src.spatial}}{{resized}}",
    "binary": "--binary --sdt={src_0.type}:{src_1.type} --ddt={dst.type} --stag={src_0.tag}:{src_1.tag} "
    "--dtag={dst.tag} {alg} | {src_0.dims}:{src_1.dims}",
    "reduction": f"--reduction {_COPY} {{alg}} {{norm}} | {{src.dims}}:{{dst.dims}}",
    "reorder": f"--reorder {_COPY} | {{src.dims}}",
    "concat": f"--concat {_COPY} --axis={{axis}} | {{src.dims}}",
    **dict.fromkeys(
        ("vanilla_rnn", "lstm", "gru", "lbr_gru"),
        "--rnn {prop} --alg={cell} {activation} --direction={order} --cfg={src_layer.type} {overwrite} {extras} "
        "| {sizes}",
    ),
    "sum": f"--sum {_COPY} --scales={{factors}} | {{first.dims}}",
}


def benchdnn_line(problem: Problem, attr: PrimitiveAttr) -> str:
    """Return the benchdnn command line of a problem.

    Result: such as ``benchdnn --matmul --dt=f32:f32:f32 … 128x768:768x3072``. A trailing comment names the layouts that
    benchdnn cannot express.
    """
    options, _, shape = _LINES[problem.kind].format_map(_Words(problem)).partition(" | ")
    attributes = ["--attr-post-ops=" + "+".join(map(_post_op, attr.ops))] if attr.ops else []
    # words without a value are empty
    words = ["benchdnn", *options.split(), *attributes, "--attr-scratchpad=user", shape]
    odd = [
        f"{name} {layout_name(desc)}" for name, desc in problem.operands() if _tag(desc) == "any" and not desc.is_any
    ]
    return " ".join(words) + (f"  # without a tag: {', '.join(odd)}" if odd else "")


def _tag(desc: NativeDesc | None) -> str:
    """Return the tag, or ``any`` if benchdnn cannot express the layout."""
    if desc is None:
        return "any"
    name = layout_name(desc)
    return name if name.isalnum() and name[0].isalpha() and name != "opaque" else "any"


class _Tensor:
    """The words of a line for one operand, or for the sources of a list."""

    def __init__(self, *descs: NativeDesc, tag: str = "") -> None:
        self.type = ":".join(desc.data_type for desc in descs)
        self.tag = tag or ":".join(map(_tag, descs))
        self.dims = ":".join("x".join(map(str, desc.dims)) for desc in descs)
        self.batch, self.channels, *sizes = (*descs[0].dims, 1)[: max(2, len(descs[0].dims))]
        self.spatial = _spatial("i", sizes)


class _Words(dict[str, object]):
    """The words of a line, each made on first use."""

    def __init__(self, problem: Any) -> None:
        super().__init__()
        self.problem = problem

    def __missing__(self, word: str) -> object:
        if word in _WORDS:
            return _WORDS[word](self.problem)
        if word in ("src", "dst", "weights", "src_0", "src_1", "src_layer"):
            return _tensor(self.problem, word)
        return getattr(self.problem, word)


def _tensor(problem: Any, name: str) -> _Tensor:
    if name == "src" and hasattr(problem, "srcs"):
        return _Tensor(*problem.srcs)
    desc = _given(problem, name)
    # otherwise oneDNN chooses the format
    return _Tensor(desc) if desc is not None else _Tensor(_given(problem, "src") or problem.srcs[0], tag="any")


def _given(problem: Any, name: str) -> NativeDesc | None:
    """Return the operand, or its gradient if only the gradient is given."""
    desc: NativeDesc | None = getattr(problem, name, None)
    return desc if desc is not None else getattr(problem, f"diff_{name}", None)


def _direction(problem: Any) -> str:
    name = _DIRECTIONS[problem.prop]
    if _given(problem, "bias") is None:
        return f"--dir={name}"
    return "--dir=" + {"FWD_I": "FWD_B", "FWD_D": "FWD_B", "BWD_W": "BWD_WB"}.get(name, name)


def _algorithm(problem: Any) -> str:
    name: str = _ALGORITHMS.get(problem.alg, problem.alg.partition("_")[2])
    return "--alg=" + name.replace("_use_dst_for_bwd", "_dst")


def _groups(problem: Any) -> str:
    weights, src = _given(problem, "weights"), _given(problem, "src")
    if weights is None or src is None:
        return str(problem.groups)
    return f"g{weights.dims[0]}" if len(weights.dims) == len(src.dims) + 1 else ""


def _window(problem: Any) -> str:
    """Return the window, such as ``ih8iw8oh4ow4kh3kw3sh2sw2ph1pw1dh0dw0``."""
    src, dst, weights = (_given(problem, name) for name in ("src", "dst", "weights"))
    assert src is not None and dst is not None
    sizes = src.dims[2:], dst.dims[2:]
    kernel = problem.kernel if weights is None else weights.dims[-len(sizes[0]) :]
    numbers = (*sizes, kernel, problem.strides, problem.pad_l, problem.dilates)
    return "".join(map(_spatial, "iokspd", numbers))


def _spatial(prefix: str, values: Sequence[int]) -> str:
    """Return sizes such as ``kh3kw3``, for the last axes of d, h, w; benchdnn names at most three."""
    names = ("?" * len(values) + "dhw")[3:]
    return "".join(f"{prefix}{axis}{value}" for axis, value in zip(names, values, strict=True))


def _resized(problem: Any) -> str:
    src, dst = _given(problem, "src"), _given(problem, "dst")
    assert src is not None
    sizes = [int(size * factor) for size, factor in zip(src.dims[2:], problem.factors or (), strict=False)]
    return _spatial("o", sizes if dst is None else dst.dims[2:])


def _flags(problem: Any) -> str:
    letters = "".join(letter for flag, letter in _NORM_FLAGS.items() if flag in NormFlags(problem.flags))
    return f"--flags={letters}" if letters else ""


def _mask(desc: NativeDesc) -> int:
    """Return the mask of the axes along which the operand is not broadcast."""
    return sum(1 << axis for axis, size in enumerate(desc.dims) if size != 1)


def _recurrent_extras(problem: Any) -> str:
    names = ("peephole", "projection") if problem.kind == "lstm" else ()
    return " ".join(f"--with-{name}=true" for name in names if getattr(problem, f"weights_{name}") is not None)


def _recurrent_sizes(problem: Any) -> str:
    # padded, for ranks that oneDNN refuses
    time, batch, channels = (*problem.src_layer.dims, 1, 1)[:3]
    layers, _, states, _, hidden = (*problem.weights_iter.dims, 1, 1, 1, 1)[:5]
    return f"l{layers}t{time}mb{batch}sic{states}slc{channels}dhc{hidden}dic{states}"


_WORDS: dict[str, Callable[[Any], object]] = {
    "dir": _direction,
    "alg": _algorithm,
    "groups": _groups,
    "window": _window,
    "resized": _resized,
    "flags": _flags,
    "bias": lambda p: f"--bia-dt={p.bias.data_type} --bia_mask={_mask(p.bias)}" if p.bias is not None else "",
    "stat": lambda p: f"--stat_tag={_tag(p.mean)}" if p.mean is not None else "",
    "data": lambda p: _tensor(p, "src" if p.src is not None else "dst"),
    "norm": lambda p: f"--p={p.p:g} --eps={p.eps:g}" if "norm" in p.alg else "",
    "factors": lambda p: ":".join(f"{scale:g}" for scale in p.scales),
    "prop": lambda p: f"--prop={_DIRECTIONS[p.prop]}",
    "cell": lambda p: p.kind.upper() if p.kind in ("vanilla_rnn", "lbr_gru") else f"VANILLA_{p.kind.upper()}",
    "activation": lambda p: f"--activation={p.activation.partition('_')[2].upper()}" if p.kind == "vanilla_rnn" else "",
    "order": lambda p: p.direction.partition("_")[2],
    "overwrite": lambda p: "--flags=O" if p.flags else "",
    "extras": _recurrent_extras,
    "sizes": _recurrent_sizes,
    "first": lambda p: _Tensor(p.srcs[0]),
}


def _post_op(op: PostOp) -> str:
    values = ":".join(f"{value:g}" for value in op.values)
    if op.kind == "eltwise":
        return f"{op.alg.removeprefix('eltwise_')}:{values}"
    if op.kind == "sum":
        return f"sum:{values}"
    if op.kind == "binary" and op.src1 is not None:
        return f"{op.alg.removeprefix('binary_')}:{op.src1.data_type}:{_mask(op.src1)}:{_tag(op.src1)}"
    if op.kind == "prelu":
        return "prelu:" + {0: "common", 2: "per_oc"}.get(int(op.values[0]), "per_tensor")
    kernel, stride, padding = (int(value) for value in op.values)
    return f"dw:k{kernel}s{stride}p{padding}:{op.dtype}"


_REMEDIES = {
    "unimplemented": "no implementation takes these formats and data types: use `any`, a plain format, or f32",
    "invalid_arguments": "the dimensions or parameters do not fit each other",
}
_lock = ProcessLock()
_default_attr: PrimitiveAttr | None = None


class Recipe(NamedTuple):
    """The arguments of the C function, kept alive so that it can be called again."""

    problem: Problem
    attr: PrimitiveAttr
    hint: Handle[Any] | None

    def create(self) -> _abi.dnnl_primitive_desc_t:
        """Return a new native descriptor of the first implementation; the caller owns it.

        Raises DnnlError if oneDNN refuses; the message has the operands and a benchdnn line; InputError or ShapeError
        or UnsupportedOpError if operands or parameters do not fit each other; LibraryError if this oneDNN version lacks
        the primitive.
        """
        name, arguments = c_call(self.problem)
        if self.hint is not None:
            arguments.append(self.hint.handle)
        out = _abi.dnnl_primitive_desc_t()
        status = getattr(lib(), name)(byref(out), *arguments, self.attr.handle)
        if status:
            remedy = _REMEDIES.get(status_name(status), "")
            details = "; ".join(filter(None, (str(self.problem), self._tail))) + (f" ({remedy})" if remedy else "")
            raise_status(f"dnnl_{name}", status, details, self.repro)
        return out

    @property
    def repro(self) -> str:
        """A benchdnn command line with the formats of the problem."""
        return benchdnn_line(self.problem, self.attr)

    @property
    def _tail(self) -> str:
        post_ops = " + ".join(f"{op.kind} {op.alg}".strip() for op in self.attr.ops)
        return f"post-ops {post_ops}" if post_ops else ""


def default_attr() -> PrimitiveAttr:
    """Return the default attributes: scratchpad mode user."""
    global _default_attr
    with _lock.current:
        if _default_attr is None or _default_attr.closed:
            _default_attr = PrimitiveAttr()
        return _default_attr
