"""The recurrent kinds of primitives: typed problems, as in `fmtprop.dnnl.kinds`.

Notes
-----
``prop`` ``"backward"`` gives the gradients of all operands. It reads the forward direction's operands and the
workspace of ``"forward_training"``, and *adds* to the gradients of weights and bias, unless flags say otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fmtprop.dnnl.desc import NativeDesc
from fmtprop.dnnl.enums import RnnFlags
from fmtprop.dnnl.kinds import Problem


@dataclass(eq=False, repr=False, kw_only=True, slots=True)
class Gru(Problem):
    """Layers of gated recurrent units over a sequence."""

    kind: ClassVar[str] = "gru"
    prop: str = "forward_inference"
    #: `src_layer`, `dst_layer`: (T, N, channels): the sequence
    src_layer: NativeDesc
    #: `src_iter`, `dst_iter`: (L, D, N, channels): the state before and after the sequence, of L layers in D
    #: directions. Default: zeros.
    src_iter: NativeDesc | None = None
    #: `weights_layer`, `weights_iter`: (L, D, input channels, gates, output channels): factors of the sequence and of
    #: the state
    weights_layer: NativeDesc
    weights_iter: NativeDesc
    #: (L, D, gates, output channels). Neither v3.2 nor v3.13 has an implementation without it.
    bias: NativeDesc | None = None
    dst_layer: NativeDesc
    dst_iter: NativeDesc | None = None
    diff_src_layer: NativeDesc | None = None
    diff_src_iter: NativeDesc | None = None
    diff_weights_layer: NativeDesc | None = None
    diff_weights_iter: NativeDesc | None = None
    diff_bias: NativeDesc | None = None
    diff_dst_layer: NativeDesc | None = None
    diff_dst_iter: NativeDesc | None = None
    #: ``"unidirectional_left2right"``, ``"unidirectional_right2left"``, ``"bidirectional_concat"`` or ``…_sum``
    direction: str = "unidirectional_left2right"
    flags: RnnFlags = RnnFlags.NONE


@dataclass(eq=False, repr=False, kw_only=True, slots=True)
class LbrGru(Gru):
    """As `Gru`, with the reset gate after the product with the state, as in PyTorch; the bias has a fourth row."""

    kind: ClassVar[str] = "lbr_gru"


@dataclass(eq=False, repr=False, kw_only=True, slots=True)
class VanillaRnn(Gru):
    """As `Gru`, with one gate."""

    kind: ClassVar[str] = "vanilla_rnn"
    #: ``"eltwise_tanh"``, ``"eltwise_relu"`` or ``"eltwise_logistic"``
    activation: str = "eltwise_tanh"
    alpha: float = 0.0
    beta: float = 0.0


@dataclass(eq=False, repr=False, kw_only=True, slots=True)
class Lstm(Gru):
    """As `Gru`, but layers of long short-term memory (LSTM), with a second state."""

    kind: ClassVar[str] = "lstm"
    #: `src_iter_c`, `dst_iter_c`: (L, D, N, channels): the cell state
    src_iter_c: NativeDesc | None = None
    #: (L, D, 3, channels)
    weights_peephole: NativeDesc | None = None
    #: (L, D, channels, projected channels)
    weights_projection: NativeDesc | None = None
    dst_iter_c: NativeDesc | None = None
    diff_src_iter_c: NativeDesc | None = None
    diff_weights_peephole: NativeDesc | None = None
    diff_weights_projection: NativeDesc | None = None
    diff_dst_iter_c: NativeDesc | None = None
