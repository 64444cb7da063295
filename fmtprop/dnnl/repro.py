"""benchdnn command lines that reproduce a primitive.

Owns benchdnn's option syntax; must not touch the library beyond reading descriptors.

References
----------
oneDNN, tests/benchdnn/doc (``driver_*.md``, ``knobs_attr.md``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fmtprop.dnnl.attr import PostOp
from fmtprop.dnnl.desc import NativeDesc, layout_name
from fmtprop.dnnl.enums import NormFlags
from fmtprop.dnnl.problem import Problem

_NORM_FLAGS = {
    NormFlags.USE_GLOBAL_STATS: "G",
    NormFlags.USE_SCALE: "C",
    NormFlags.USE_SHIFT: "H",
    NormFlags.FUSE_NORM_RELU: "R",
    NormFlags.FUSE_NORM_ADD_RELU: "A",
}
_ALGORITHMS = {
    "convolution_direct": "direct",
    "convolution_winograd": "wino",
    "convolution_auto": "auto",
    "deconvolution_direct": "direct",
    "deconvolution_winograd": "wino",
    "pooling_max": "max",
    "pooling_avg_include_padding": "avg_p",
    "pooling_avg_exclude_padding": "avg_np",
    "lrn_across_channels": "ACROSS",
    "lrn_within_channel": "WITHIN",
    "softmax_accurate": "SOFTMAX",
    "softmax_log": "LOGSOFTMAX",
}


def benchdnn_line(problem: Problem) -> str:
    """Return the benchdnn command line of a problem.

    Parameters
    ----------
    problem : Problem

    Returns
    -------
    str
        Such as ``benchdnn --matmul --dt=f32:f32:f32 … 128x768:768x3072``. Layouts that benchdnn has no syntax
        for are named in a trailing comment.
    """
    options, shape = _DRIVERS[problem.driver](problem)
    attributes = [f"--attr-fpmath={problem.fpmath}"] if problem.fpmath else []
    if problem.post_ops:
        attributes.append("--attr-post-ops=" + "+".join(map(_post_op, problem.post_ops)))
    words = ["benchdnn", f"--{problem.driver}", *options, *attributes, "--attr-scratchpad=user", shape]
    present = {name: desc for name, desc in problem.operands.items() if desc is not None}
    odd = [f"{name} {layout_name(desc)}" for name, desc in present.items() if _tag(desc) == "any" and not desc.is_any]
    return " ".join(words) + (f"  # without a tag: {', '.join(odd)}" if odd else "")


def _tag(desc: NativeDesc | None) -> str:
    """Return the tag, or ``any`` where benchdnn cannot express the layout."""
    if desc is None:
        return "any"
    name = layout_name(desc)
    return name if name.isalnum() and name[0].isalpha() and name != "opaque" else "any"


def _pick(problem: Problem, *names: str) -> NativeDesc:
    """Return the first operand that is present under one of these names."""
    for name in names:
        desc = problem.operands.get(name)
        if desc is not None:
            return desc
    raise KeyError(f"{problem.driver} has none of the operands {names}")


def _dims(desc: NativeDesc) -> str:
    return "x".join(map(str, desc.dims))


def _direction(problem: Problem, bias: bool = False) -> str:
    prop = problem.params["prop"]
    if prop == "forward_inference":
        return "--dir=" + ("FWD_B" if bias else "FWD_I")
    if prop == "forward_training":
        return "--dir=" + ("FWD_B" if bias else "FWD_D")
    return {"backward_data": "--dir=BWD_D", "backward_weights": "--dir=" + ("BWD_WB" if bias else "BWD_W")}.get(
        prop, "--dir=BWD_DW"
    )


def _algorithm(problem: Problem) -> str:
    alg = str(problem.params["alg"])
    if alg in _ALGORITHMS:
        return f"--alg={_ALGORITHMS[alg]}"
    name = alg.partition("_")[2]
    return "--alg=" + name.replace("_use_dst_for_bwd", "_dst")


def _types(option: str, *descs: NativeDesc | None) -> str:
    return f"--{option}=" + ":".join(desc.data_type for desc in descs if desc is not None)


def _post_op(op: PostOp) -> str:
    values = ":".join(f"{value:g}" for value in op.values)
    if op.kind == "eltwise":
        return f"{op.alg.removeprefix('eltwise_')}:{values}"
    if op.kind == "sum":
        return f"sum:{values}" + (f":{op.dtype}" if op.dtype else "")
    if op.kind == "binary" and op.src1 is not None:
        mask = sum(1 << axis for axis, size in enumerate(op.src1.dims) if size != 1)
        return f"{op.alg.removeprefix('binary_')}:{op.src1.data_type}:{mask}:{_tag(op.src1)}"
    if op.kind == "prelu":
        return "prelu:" + {0: "common", 2: "per_oc"}.get(int(op.values[0]), "per_tensor")
    kernel, stride, padding = (int(value) for value in op.values)
    return f"dw:k{kernel}s{stride}p{padding}:{op.dtype}"


def _spatial(prefix: str, values: Sequence[int]) -> str:
    """Return such as ``kh3kw3``: the last entries of d, h, w."""
    return "".join(f"{prefix}{axis}{value}" for axis, value in zip("dhw"[-len(values) :], values, strict=True))


Parts = tuple[list[str], str]


def _window_shape(problem: Problem, src: NativeDesc, dst: NativeDesc, kernel: Sequence[int], dilation: str) -> str:
    params = problem.params
    return (
        _spatial("i", src.dims[2:])
        + _spatial("o", dst.dims[2:])
        + _spatial("k", kernel)
        + _spatial("s", params["strides"])
        + _spatial("p", params["pad_l"])
        + _spatial("d", params[dilation])
    )


def _convolution(problem: Problem) -> Parts:
    src, dst = _pick(problem, "src", "diff_src"), _pick(problem, "dst", "diff_dst")
    weights = _pick(problem, "weights", "diff_weights")
    bias = problem.operands.get("bias") or problem.operands.get("diff_bias")
    grouped = len(weights.dims) == len(src.dims) + 1
    spatial = len(src.dims) - 2
    options = [
        _direction(problem, bias is not None),
        _types("dt", src, weights, dst),
        f"--stag={_tag(src)} --wtag={_tag(weights)} --dtag={_tag(dst)}",
        _algorithm(problem),
    ]
    head = (f"g{weights.dims[0]}" if grouped else "") + f"mb{src.dims[0]}ic{src.dims[1]}oc{dst.dims[1]}"
    return options, head + _window_shape(problem, src, dst, weights.dims[-spatial:], "dilates")


def _inner_product(problem: Problem) -> Parts:
    src, dst = _pick(problem, "src", "diff_src"), _pick(problem, "dst", "diff_dst")
    weights = _pick(problem, "weights", "diff_weights")
    bias = problem.operands.get("bias") or problem.operands.get("diff_bias")
    options = [
        _direction(problem, bias is not None),
        _types("dt", src, weights, dst),
        f"--stag={_tag(src)} --wtag={_tag(weights)} --dtag={_tag(dst)}",
    ]
    return options, f"mb{src.dims[0]}ic{src.dims[1]}oc{dst.dims[1]}" + _spatial("i", src.dims[2:] or (1,))


def _matmul(problem: Problem) -> Parts:
    src, weights, dst = (_pick(problem, name) for name in ("src", "weights", "dst"))
    bias = problem.operands["bias"]
    options = [_types("dt", src, weights, dst), f"--stag={_tag(src)} --wtag={_tag(weights)} --dtag={_tag(dst)}"]
    if bias is not None:
        mask = sum(1 << axis for axis, size in enumerate(bias.dims) if size != 1)
        options.append(f"--bia-dt={bias.data_type} --bia_mask={mask}")
    return options, f"{_dims(src)}:{_dims(weights)}"


def _pooling(problem: Problem) -> Parts:
    src, dst = _pick(problem, "src", "diff_src"), _pick(problem, "dst", "diff_dst")
    options = [_direction(problem), _types("dt", src, dst), f"--tag={_tag(src)}", _algorithm(problem)]
    shape = _window_shape(problem, src, dst, problem.params["kernel"], "dilation")
    return options, f"mb{src.dims[0]}ic{src.dims[1]}{shape}"


def _eltwise(problem: Problem) -> Parts:
    data = _pick(problem, "src", "data")
    params = problem.params
    numbers = f"--alpha={params['alpha']:g} --beta={params['beta']:g}"
    options = [_direction(problem), _types("dt", data), f"--tag={_tag(data)}", _algorithm(problem), numbers]
    return options, _dims(data)


def _flags(problem: Problem) -> list[str]:
    letters = "".join(letter for flag, letter in _NORM_FLAGS.items() if flag in problem.params["flags"])
    return [f"--flags={letters}"] if letters else []


def _channel_normalization(problem: Problem) -> Parts:
    src = _pick(problem, "src")
    options = [_direction(problem), _types("dt", src), f"--tag={_tag(src)}", *_flags(problem)]
    groups = f"g{problem.params['groups']}" if "groups" in problem.params else ""
    shape = f"{groups}mb{src.dims[0]}ic{src.dims[1]}" + _spatial("i", src.dims[2:])
    return options, f"{shape}eps{problem.params['epsilon']:g}"


def _layer_normalization(problem: Problem) -> Parts:
    src, dst = _pick(problem, "src"), _pick(problem, "dst", "diff_dst")
    stat = problem.operands["stat"]
    options = [_direction(problem), _types("dt", src, dst), f"--tag={_tag(src)}:{_tag(dst)}", *_flags(problem)]
    if stat is not None:
        options.append(f"--stat_tag={_tag(stat)}")
    return options, _dims(src)


def _lrn(problem: Problem) -> Parts:
    src, params = _pick(problem, "src"), problem.params
    options = [_direction(problem), _types("dt", src), f"--tag={_tag(src)}", _algorithm(problem)]
    shape = f"mb{src.dims[0]}ic{src.dims[1]}" + _spatial("i", src.dims[2:])
    return options, f"{shape}ls{params['local_size']}alpha{params['alpha']:g}beta{params['beta']:g}k{params['k']:g}"


def _softmax(problem: Problem) -> Parts:
    src, dst = _pick(problem, "src", "diff_src"), _pick(problem, "dst")
    formats = f"--stag={_tag(src)} --dtag={_tag(dst)}"
    axis = f"--axis={problem.params['axis']}"
    return [_direction(problem), _types("sdt", src), _types("ddt", dst), formats, _algorithm(problem), axis], _dims(dst)


def _binary(problem: Problem) -> Parts:
    src0, src1, dst = (_pick(problem, name) for name in ("src0", "src1", "dst"))
    formats = f"--stag={_tag(src0)}:{_tag(src1)} --dtag={_tag(dst)}"
    options = [_types("sdt", src0, src1), _types("ddt", dst), formats, _algorithm(problem)]
    return options, f"{_dims(src0)}:{_dims(src1)}"


def _sources(problem: Problem) -> tuple[list[NativeDesc], list[str]]:
    srcs = [desc for name, desc in problem.operands.items() if name.startswith("src") and desc is not None]
    dst = problem.operands["dst"]
    formats = f"--stag={':'.join(map(_tag, srcs))} --dtag={_tag(dst)}"
    return srcs, [_types("sdt", *srcs), _types("ddt", dst or srcs[0]), formats]


def _sum(problem: Problem) -> Parts:
    srcs, options = _sources(problem)
    scales = "--scales=" + ":".join(f"{scale:g}" for scale in problem.params["scales"])
    return [*options, scales], _dims(srcs[0])


def _concat(problem: Problem) -> Parts:
    srcs, options = _sources(problem)
    return [*options, f"--axis={problem.params['axis']}"], ":".join(map(_dims, srcs))


def _reduction(problem: Problem) -> Parts:
    src, dst = _pick(problem, "src"), _pick(problem, "dst")
    options = [_types("sdt", src), _types("ddt", dst), f"--stag={_tag(src)} --dtag={_tag(dst)}", _algorithm(problem)]
    if "norm" in problem.params["alg"]:
        options.append(f"--p={problem.params['p']:g} --eps={problem.params['eps']:g}")
    return options, f"{_dims(src)}:{_dims(dst)}"


def _resampling(problem: Problem) -> Parts:
    src = _pick(problem, "src", "diff_src")
    dst = problem.operands.get("dst") or problem.operands.get("diff_dst")
    factors = problem.params["factors"] or ()
    out = dst.dims[2:] if dst is not None else [int(n * f) for n, f in zip(src.dims[2:], factors, strict=True)]
    types = [_types("sdt", src), _types("ddt", dst or src)]
    options = [_direction(problem), *types, f"--tag={_tag(src)}", _algorithm(problem)]
    return options, f"mb{src.dims[0]}ic{src.dims[1]}" + _spatial("i", src.dims[2:]) + _spatial("o", out)


def _shuffle(problem: Problem) -> Parts:
    src = _pick(problem, "src", "diff_src")
    numbers = f"--axis={problem.params['axis']} --group={problem.params['group_size']}"
    return [_direction(problem), _types("dt", src), f"--tag={_tag(src)}", numbers], _dims(src)


def _reorder(problem: Problem) -> Parts:
    src, dst = _pick(problem, "src"), _pick(problem, "dst")
    return [_types("sdt", src), _types("ddt", dst), f"--stag={_tag(src)} --dtag={_tag(dst)}"], _dims(src)


def _prelu(problem: Problem) -> Parts:
    src, weights = _pick(problem, "src"), _pick(problem, "weights")
    options = [_direction(problem), _types("sdt", src, weights), f"--stag={_tag(src)}:{_tag(weights)}"]
    return options, f"{_dims(src)}:{_dims(weights)}"


_DRIVERS: dict[str, Callable[[Problem], Parts]] = {
    "conv": _convolution,
    "deconv": _convolution,
    "ip": _inner_product,
    "matmul": _matmul,
    "pool": _pooling,
    "eltwise": _eltwise,
    "bnorm": _channel_normalization,
    "gnorm": _channel_normalization,
    "lnorm": _layer_normalization,
    "lrn": _lrn,
    "softmax": _softmax,
    "binary": _binary,
    "sum": _sum,
    "concat": _concat,
    "reduction": _reduction,
    "resampling": _resampling,
    "shuffle": _shuffle,
    "reorder": _reorder,
    "prelu": _prelu,
}
