"""Primitive attributes and post-ops."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import byref
from dataclasses import dataclass
from types import MappingProxyType

from fmtprop.dnnl import _abi
from fmtprop.dnnl.desc import NativeDesc
from fmtprop.dnnl.enums import algorithm, data_type
from fmtprop.dnnl.handle import Handle
from fmtprop.dnnl.library import lib, raise_status
from fmtprop.dnnl.sizes import int64_array
from fmtprop.errors import UnsupportedOpError

_USER_SCRATCHPAD = _abi.ENUMS["dnnl_scratchpad_mode_t"]["scratchpad_mode_user"]
_UNDEF = _abi.ENUMS["dnnl_data_type_t"]["data_type_undef"]

#: most post-ops of a primitive (oneDNN's `post_ops_t::post_ops_limit`)
_LIMIT = 32


@dataclass(frozen=True)
class PostOp:
    """One post-op of a chain, for messages, reports and benchdnn lines."""

    #: ``"eltwise"``, ``"sum"``, ``"binary"``, ``"prelu"`` or ``"convolution"`` (depthwise)
    kind: str
    alg: str = ""
    #: numbers in the order of the ``append_*`` parameters
    values: tuple[float, ...] = ()
    #: second source of a binary post-op
    src1: NativeDesc | None = None
    dtype: str = ""


class PostOps(Handle[_abi.dnnl_post_ops_t]):
    """A chain of post-ops, applied to the result of a primitive in this order.

    Every ``append_*`` returns the object itself. Raises UnsupportedOpError for the 33rd post-op, DnnlError if oneDNN
    refuses.

    >>> from fmtprop import dnnl
    >>> post_ops = dnnl.PostOps().append_sum(1.0).append_eltwise("eltwise_relu")
    >>> [op.kind for op in post_ops.ops]
    ['sum', 'eltwise']
    """

    handle_kind = "post_ops"
    __slots__ = ("ops",)

    def __init__(self) -> None:
        out = _abi.dnnl_post_ops_t()
        raise_status("dnnl_post_ops_create", lib().post_ops_create(byref(out)))
        super().__init__(out, lib().post_ops_destroy)
        self.ops: list[PostOp] = []

    def __len__(self) -> int:
        return len(self.ops)

    def append_eltwise(self, alg: str, alpha: float = 0.0, beta: float = 0.0) -> PostOps:
        """Append ``dst = alg(dst)``."""
        status = lib().post_ops_append_eltwise(self.handle, algorithm(alg), alpha, beta)
        return self._appended("eltwise", status, PostOp("eltwise", alg, (alpha, beta)))

    def append_sum(self, scale: float = 1.0) -> PostOps:
        """Append ``dst = result + scale * old dst``."""
        status = lib().post_ops_append_sum(self.handle, scale, 0, _UNDEF)
        return self._appended("sum", status, PostOp("sum", values=(scale,)))

    def append_binary(self, alg: str, src1: NativeDesc) -> PostOps:
        """Append ``dst = alg(dst, src1)``; src1 is broadcast.

        `src1`: at execution it is argument ``Arg.ATTR_MULTIPLE_POST_OP(i) | Arg.SRC_1``.
        """
        status = lib().post_ops_append_binary(self.handle, algorithm(alg), src1.handle)
        return self._appended("binary", status, PostOp("binary", alg, src1=src1))

    def append_prelu(self, mask: int) -> PostOps:
        """Append a prelu; its slopes vary along the axes set in ``mask``.

        `mask`: bit i set: one slope per index of axis i. At execution the slopes (f32, plain) are argument
        ``Arg.ATTR_MULTIPLE_POST_OP(i) | Arg.WEIGHTS``.
        """
        status = lib().post_ops_append_prelu(self.handle, mask)
        return self._appended("prelu", status, PostOp("prelu", values=(mask,)))

    def append_dw(
        self,
        weights_dtype: object,
        bias_dtype: object,
        dst_dtype: object,
        kernel: int,
        stride: int,
        padding_l: int,
    ) -> PostOps:
        """Append a depthwise 2-D convolution.

        `weights_dtype`, `bias_dtype`, `dst_dtype`: ``bias_dtype`` None for no bias. `kernel`, `stride`, `padding_l`:
        same in both spatial axes. Weights and bias are arguments ``Arg.ATTR_POST_OP_DW | Arg.WEIGHTS`` and
        ``Arg.ATTR_POST_OP_DW | Arg.BIAS``.
        """
        bias = _UNDEF if bias_dtype is None else data_type(bias_dtype)
        int64_array((kernel, stride, padding_l), "depthwise kernel, stride and padding")
        status = lib().post_ops_append_dw(
            self.handle, data_type(weights_dtype), bias, data_type(dst_dtype), kernel, stride, padding_l
        )
        op = PostOp("convolution", values=(kernel, stride, padding_l), dtype=str(dst_dtype))
        return self._appended("dw", status, op)

    def _appended(self, name: str, status: int, op: PostOp) -> PostOps:
        if len(self.ops) >= _LIMIT:
            raise UnsupportedOpError(f"a primitive has at most {_LIMIT} post-ops: there is no place for {op}")
        raise_status(f"dnnl_post_ops_append_{name}", status, f"{op} after {len(self.ops)} others")
        self.ops.append(op)
        return self


class PrimitiveAttr(Handle[_abi.dnnl_primitive_attr_t]):
    """Attributes of a primitive: its post-ops, and a scratchpad that the caller owns.

    With a scratchpad of the library, a primitive may crash outside the thread that created it.

    `scales`: argument -> bits of the axes along which its scales vary. At execution, the scales (f32) are argument
    ``Arg.ATTR_SCALES | argument``. `zero_points`: the same of zero points (s32), which are argument
    ``Arg.ATTR_ZERO_POINTS | argument``. Raises DnnlError if oneDNN refuses.
    """

    handle_kind = "primitive_attr"
    __slots__ = ("ops", "scales", "zero_points")

    def __init__(
        self,
        post_ops: PostOps | None = None,
        scales: Mapping[int, int] = MappingProxyType({}),
        zero_points: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        out = _abi.dnnl_primitive_attr_t()
        raise_status("dnnl_primitive_attr_create", lib().primitive_attr_create(byref(out)))
        super().__init__(out, lib().primitive_attr_destroy)
        self.ops: tuple[PostOp, ...] = tuple(post_ops.ops) if post_ops is not None else ()
        self.scales, self.zero_points = scales, zero_points
        self._set("scratchpad_mode", _USER_SCRATCHPAD)
        for argument, mask in scales.items():
            self._set("scales_mask", argument, mask)
        for argument, mask in zero_points.items():
            self._set("zero_points_mask", argument, mask)
        if post_ops is not None:
            self._set("post_ops", post_ops.handle)

    def _set(self, name: str, *values: object) -> None:
        function = getattr(lib(), f"primitive_attr_set_{name}")
        raise_status(f"dnnl_primitive_attr_set_{name}", function(self.handle, *values), f"value {values[-1]}")
