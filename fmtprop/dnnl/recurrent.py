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
    """Layers of gated recurrent units over a sequence.

    Parameters
    ----------
    src_layer, dst_layer : NativeDesc
        (T, N, channels): the sequence.
    src_iter, dst_iter : NativeDesc, optional
        (L, D, N, channels): the state before and after the sequence, of L layers in D directions. Default: zeros.
    weights_layer, weights_iter : NativeDesc
        (L, D, input channels, gates, output channels): factors of the sequence and of the state.
    bias : NativeDesc, optional
        (L, D, gates, output channels). Neither v3.2 nor v3.13 has an implementation without it.
    direction : str
        ``"unidirectional_left2right"``, ``"unidirectional_right2left"``, ``"bidirectional_concat"`` or ``…_sum``.
    flags : RnnFlags
    """

    kind: ClassVar[str] = "gru"
    prop: str = "forward_inference"
    src_layer: NativeDesc
    src_iter: NativeDesc | None = None
    weights_layer: NativeDesc
    weights_iter: NativeDesc
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
    direction: str = "unidirectional_left2right"
    flags: RnnFlags = RnnFlags.NONE


@dataclass(eq=False, repr=False, kw_only=True, slots=True)
class LbrGru(Gru):
    """As `Gru`, with the reset gate after the product with the state, as in PyTorch; the bias has a fourth row."""

    kind: ClassVar[str] = "lbr_gru"


@dataclass(eq=False, repr=False, kw_only=True, slots=True)
class VanillaRnn(Gru):
    """As `Gru`, with one gate.

    Parameters
    ----------
    activation : str
        ``"eltwise_tanh"``, ``"eltwise_relu"`` or ``"eltwise_logistic"``.
    alpha, beta : float
        Parameters of the activation.
    """

    kind: ClassVar[str] = "vanilla_rnn"
    activation: str = "eltwise_tanh"
    alpha: float = 0.0
    beta: float = 0.0


@dataclass(eq=False, repr=False, kw_only=True, slots=True)
class Lstm(Gru):
    """As `Gru`, but layers of long short-term memory (LSTM), with a second state.

    Parameters
    ----------
    src_iter_c, dst_iter_c : NativeDesc, optional
        (L, D, N, channels): the cell state.
    weights_peephole : NativeDesc, optional
        (L, D, 3, channels).
    weights_projection : NativeDesc, optional
        (L, D, channels, projected channels).
    """

    kind: ClassVar[str] = "lstm"
    src_iter_c: NativeDesc | None = None
    weights_peephole: NativeDesc | None = None
    weights_projection: NativeDesc | None = None
    dst_iter_c: NativeDesc | None = None
    diff_src_iter_c: NativeDesc | None = None
    diff_weights_peephole: NativeDesc | None = None
    diff_weights_projection: NativeDesc | None = None
    diff_dst_iter_c: NativeDesc | None = None
