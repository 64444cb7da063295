"""Facts about calls of PyTorch's functions: their costs, and the numbers, types and strides of their operands.

The only tables of overloads by name; :mod:`fmtprop.ops.host` makes the calls.
"""

from __future__ import annotations

import json
import math

import torch

from fmtprop.ops.host_call import NAMESPACES, CallOperand, HostCall, in_place_form, prepare

#: calls with separate kernels for channels-last tensors, some of them ten times as fast; `tests/ops/test_host.py`
#: compares their results with those for row-major tensors
ANY_STRIDES = frozenset(
    {
        *(f"aten.{name}.default" for name in ("max_pool2d_with_indices", "avg_pool2d", "adaptive_max_pool2d")),
        *(f"aten.{name}.default" for name in ("adaptive_avg_pool2d", "_adaptive_avg_pool2d")),
        *(f"aten.{name}_backward.default" for name in ("max_pool2d_with_indices", "avg_pool2d")),
        "aten._adaptive_avg_pool2d_backward.default",
        *(
            f"aten.upsample_{name}2d{form}"
            for name in ("nearest", "bilinear", "bicubic")
            for form in (".vec", ".default", "_backward.default")
        ),
    }
    # which writes a row-major result into memory in any other order
) - {"aten.upsample_bicubic2d_backward.default"}
#: places that a kernel reads one after another for an element of its result; on [8, 32, 128, 128] and 2 threads, the
#: gradient of a bilinear resampling takes 7.7 ms by rows, 1.2 ms with channels innermost
_WINDOWS = {
    "upsample_nearest2d_backward": 1.0,
    "upsample_bilinear2d": 0.4,
    "upsample_bilinear2d_backward": 4.0,
    "upsample_bicubic2d": 1.6,
    "upsample_bicubic2d_backward": 16.0,
}
#: calls that keep the data type of their operand
_NARROWS = frozenset(
    {
        "aten.max_pool2d_with_indices.default",
        "aten.max_pool2d_with_indices_backward.default",
        "aten.adaptive_max_pool2d.default",
        "aten.avg_pool2d_backward.default",
        "aten._adaptive_avg_pool2d_backward.default",
    }
)
#: arguments with positions as numbers: of grid samples, of a deformable convolution
_POSITIONS = ("grid", "offset")
#: arguments with places at which rows begin or end: rows that belong to none are not written
_OFFSETS = ("offs", "offsets")
#: calls that compare the numbers of their first operand and return places: equal numbers in a narrow type are a tie, so
#: a mixture of experts would ask another expert
_CHOOSING = frozenset(
    {
        *(f"aten.{name}.default" for name in ("topk", "sort", "argsort", "argmax", "argmin", "kthvalue", "mode")),
        *("aten.sort.stable", "aten.argsort.stable", "aten.max.dim", "aten.min.dim", "aten.median.dim"),
    }
)
#: arguments with the places that a call changes
_PLACES = frozenset({"index", "indices"})
_GATHER = "aten.gather.default"
#: calls with separate kernels for an index of one axis that repeats along the others, as graph layers have it: with a
#: copy of it they take 5 to 15 times as long ([2000, 64] from 20 000 edges)
_INDEXED = frozenset({_GATHER, "aten.scatter_add.default", "aten.scatter_reduce.two", "aten.scatter.src"})
#: calls that read some of their first operand's numbers, those whose places others give
_PICKS = frozenset({"embedding", "gather", "index", "index_select", "take"})
#: an element-wise call without PyTorch's tag for it
_CONVERSION = "aten._to_copy.default"


def checkable(attrs: HostCall) -> bool:
    """Return whether a call takes any numbers: not places of rows, nor indices and workspaces of a forward call."""
    if "backward" in attrs.target or "mkldnn_rnn" in attrs.target:
        return False
    return not any(_operand(attrs, name) for name in _OFFSETS)


def narrows(attrs: HostCall) -> bool:
    """Return whether a call keeps the data type of its operand."""
    return attrs.target in _NARROWS


def window(attrs: HostCall) -> float:
    """Return the places that a call reads one after another for an element of its result, for the costs."""
    name = attrs.target.split(".")[1]
    if name == "max_pool2d_with_indices":
        return float(math.prod(json.loads(attrs.arguments)["kernel_size"]))
    return _WINDOWS.get(name, 0.0)


def picks(attrs: HostCall) -> bool:
    """Return whether a call reads no more numbers than it writes, for the costs."""
    return attrs.target.split(".")[1] in _PICKS


def positions(attrs: HostCall) -> frozenset[str]:
    """Return the operands with numbers that are positions in another operand, become integers, or choose places."""
    found = [_operand(attrs, name) for name in (*_POSITIONS, *(("self",) if attrs.target in _CHOOSING else ()))]
    dtype = prepare(attrs).kwargs.get("dtype")
    if attrs.target == _CONVERSION and dtype is not None and not dtype.is_floating_point:
        found.append(_operand(attrs, "self"))
    return frozenset(filter(None, found))


def repeated(attrs: HostCall) -> frozenset[str]:
    """Return the operands of a call that is faster if these repeat as views: an index, what is gathered along rows."""
    names = ["index"] if attrs.target in _INDEXED else []
    if attrs.target == _GATHER and prepare(attrs).args[1] != 0:  # the kernel for the first axis reads dense rows
        names.append("self")
    return frozenset(filter(None, (_operand(attrs, name) for name in names)))


def changed(attrs: HostCall) -> str | None:
    """Return the operand of which a call copies all numbers but some, which it changes."""
    prepared = prepare(attrs)
    first = (*prepared.args, None)[0]
    if prepared.row_major or not isinstance(first, CallOperand) or first.is_complex:
        return None
    named = any(argument.name in _PLACES for argument in prepared.function._schema.arguments)
    is_part = named or prepared.function._opname.endswith("_scatter")
    return first.name if is_part and in_place_form(prepared.function) is not None else None


def overwritten(attrs: HostCall) -> str | None:
    """Return the operand whose memory an element-wise call may write its result to."""
    prepared = prepare(attrs)
    first = (*prepared.args, None)[0]
    if not isinstance(first, CallOperand) or first.is_complex or torch.Tag.pointwise not in prepared.function.tags:
        return None
    return first.name if in_place_form(prepared.function) is not None else None


def _operand(attrs: HostCall, name: str) -> str | None:
    """Return the operand that is the argument of this name."""
    prepared = prepare(attrs)
    named = dict(zip((a.name for a in prepared.function._schema.arguments), prepared.args, strict=False))
    value = named.get(name)
    return value.name if isinstance(value, CallOperand) else None


def any_strides(attrs: HostCall) -> bool:
    """Return whether the call is right for any strides.

    It is element-wise, changes a part of a tensor, or its channels-last kernels are tested.

    Other calls may confuse memory formats: max-unpooling reads channels-last indices as row-major ones.
    """
    function = prepare(attrs).function
    known = attrs.target == _CONVERSION or attrs.target in ANY_STRIDES or changed(attrs) is not None
    return function.namespace in NAMESPACES and (torch.Tag.pointwise in function.tags or known)
