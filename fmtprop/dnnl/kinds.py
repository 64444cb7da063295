"""Typed problems: one class for each kind of primitive, for all its directions (forward and backward).

Owns names and meanings of operands and parameters. Must not know oneDNN's functions: see `fmtprop.dnnl.specs`.

Notes
-----
Operands are `NativeDesc`. A problem has the operands of its direction; the others, and absent optional ones, are None.
``prop`` is the propagation kind: ``"forward_inference"`` or ``"forward_training"``; and one or two of
``"backward_data"`` (gradient of the source), ``"backward_weights"`` (gradients of weights and bias) and ``"backward"``
(all gradients). A gradient has the name of its tensor with the prefix ``diff_``. Numbers have oneDNN's meaning: a
dilation of 0 is dense, axes count from 0.

Of recurrent kinds, ``"backward"`` gives the gradients of all operands. It reads the forward direction's operands and
the workspace of ``"forward_training"``, and *adds* to the gradients of weights and bias, unless flags say otherwise.

References
----------
oneapi/dnnl/dnnl.h, ``dnnl_*_primitive_desc_create``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

from fmtprop.dnnl.desc import NativeDesc
from fmtprop.dnnl.enums import NormFlags, RnnFlags


@dataclass(eq=False, repr=False, kw_only=True, slots=True)
class Problem:
    """Operands and parameters of one operation."""

    kind: ClassVar[str] = ""
    #: propagation kind; empty for the kinds without directions
    prop: str = ""

    def operands(self) -> Iterator[tuple[str, NativeDesc]]:
        """Yield name and descriptor of every operand that is given; sources of a list are numbered: ``src_0``, …."""
        for name, value in self._values():
            if isinstance(value, NativeDesc):
                yield name, value
            elif name == "srcs" and isinstance(value, Sequence):
                yield from ((f"src_{index}", desc) for index, desc in enumerate(value))

    def _values(self) -> Iterator[tuple[str, object]]:
        return ((field.name, getattr(self, field.name)) for field in fields(self))

    def __str__(self) -> str:
        operands = ", ".join(f"{name} {desc}" for name, desc in self.operands())
        numbers = [
            f"{name}={tuple(value) if isinstance(value, list) else value}"
            for name, value in self._values()
            if not isinstance(value, NativeDesc) and name != "srcs" and value not in (None, "")
        ]
        return "; ".join(filter(None, (operands, ", ".join(numbers))))


@dataclass(eq=False, repr=False, kw_only=True, slots=True)
class Directed(Problem):
    """A problem from a source to a destination, and its gradient."""

    prop: str = "forward_inference"
    src: NativeDesc | None = None
    dst: NativeDesc | None = None
    diff_src: NativeDesc | None = None
    diff_dst: NativeDesc | None = None


@dataclass(eq=False, repr=False, kw_only=True, slots=True)
class Weighted(Directed):
    """A problem with weights and an optional bias."""

    weights: NativeDesc | None = None
    bias: NativeDesc | None = None
    diff_weights: NativeDesc | None = None
    diff_bias: NativeDesc | None = None


@dataclass(eq=False, repr=False, kw_only=True, slots=True)
class InnerProduct(Weighted):
    """A fully connected layer.

    `src`, `weights`, `bias`, `dst`: (N, IC, spatial…), (OC, IC, spatial…), optionally (OC,), (N, OC).
    """

    kind: ClassVar[str] = "inner_product"


@dataclass(eq=False, repr=False, kw_only=True, slots=True)
class Convolution(Weighted):
    """A convolution.

    `src`, `weights`, `bias`, `dst`: (N, IC, spatial), (OC, IC, window) or grouped (G, OC/G, IC/G, window), optionally
    (OC,), (N, OC, spatial).

    >>> from fmtprop import dnnl
    >>> from fmtprop.layout import MemoryDesc
    >>> src, weights, dst = (
    ...     dnnl.NativeDesc.from_desc(MemoryDesc.any(dims, "f32"))
    ...     for dims in [(1, 16, 8, 8), (32, 16, 3, 3), (1, 32, 8, 8)]
    ... )
    >>> window = {"strides": (1, 1), "dilates": (0, 0), "pad_l": (1, 1), "pad_r": (1, 1)}
    >>> pd = dnnl.create(dnnl.Convolution(src=src, weights=weights, dst=dst, **window))
    >>> pd.query_md("dst").dims
    (1, 32, 8, 8)
    """

    kind: ClassVar[str] = "convolution"
    #: `strides`, `dilates`, `pad_l`, `pad_r`: one entry per spatial axis
    strides: Sequence[int]
    dilates: Sequence[int]
    pad_l: Sequence[int]
    pad_r: Sequence[int]
    #: ``"convolution_direct"``, ``"convolution_winograd"`` or ``"convolution_auto"``
    alg: str = "convolution_direct"


@dataclass(eq=False, repr=False, kw_only=True, slots=True)
class Deconvolution(Convolution):
    """A transposed convolution, with ``alg`` ``"deconvolution_direct"`` or ``"deconvolution_winograd"``.

    Operands and parameters are those of `Convolution`. Weights are (OC, IC, window), PyTorch's weights with the first
    two axes exchanged.
    """

    kind: ClassVar[str] = "deconvolution"
    alg: str = "deconvolution_direct"


@dataclass(eq=False, repr=False, kw_only=True, slots=True)
class Pooling(Directed):
    """A pooling. Max pooling in training has a workspace; its gradient needs one of the same implementation.

    `src`, `dst`: (N, C, spatial).
    """

    kind: ClassVar[str] = "pooling"
    #: ``"pooling_max"``, ``"pooling_avg_include_padding"`` or ``"pooling_avg_exclude_padding"``
    alg: str
    #: `kernel`, `strides`, `dilates`, `pad_l`, `pad_r`: one entry per spatial axis
    kernel: Sequence[int]
    strides: Sequence[int]
    dilates: Sequence[int]
    pad_l: Sequence[int]
    pad_r: Sequence[int]


@dataclass(eq=False, repr=False, kw_only=True, slots=True)
class Lrn(Directed):
    """A local response normalization. The gradient reads src, and may need the workspace of the forward primitive."""

    kind: ClassVar[str] = "lrn"
    alg: str
    local_size: int
    alpha: float
    beta: float
    k: float


@dataclass(eq=False, repr=False, kw_only=True, slots=True)
class BatchNormalization(Directed):
    """A batch normalization of (N, C, spatial).

    The gradient reads src. With scale or shift, ``prop`` is ``"backward"`` and their gradients are computed too;
    without them, it is ``"backward_data"``.
    """

    kind: ClassVar[str] = "batch_normalization"
    epsilon: float
    flags: NormFlags = NormFlags.NONE


@dataclass(eq=False, repr=False, kw_only=True, slots=True)
class LayerNormalization(BatchNormalization):
    """A layer normalization over the last axis, with the directions of `BatchNormalization`."""

    kind: ClassVar[str] = "layer_normalization"
    #: descriptor of mean and variance: src without its last axis. Without it, oneDNN chooses.
    mean: NativeDesc | None = None


@dataclass(eq=False, repr=False, kw_only=True, slots=True)
class GroupNormalization(BatchNormalization):
    """A group normalization of (N, C, spatial), with the directions of `BatchNormalization` (oneDNN v3.3 and later)."""

    kind: ClassVar[str] = "group_normalization"
    groups: int


@dataclass(eq=False, repr=False, kw_only=True, slots=True)
class Eltwise(Directed):
    """An element-wise operation.

    `src`, `dst`: same dims; src has a concrete format. The gradient reads src, or dst if the algorithm's name ends in
    ``_use_dst_for_bwd``.
    """

    kind: ClassVar[str] = "eltwise"
    alg: str
    alpha: float = 0.0
    beta: float = 0.0


@dataclass(eq=False, repr=False, kw_only=True, slots=True)
class Prelu(Directed):
    """A prelu; ``"backward"`` gives the gradients of source and slopes."""

    kind: ClassVar[str] = "prelu"
    #: slopes; as many axes as src, each with src's size or 1
    weights: NativeDesc | None = None
    diff_weights: NativeDesc | None = None


@dataclass(eq=False, repr=False, kw_only=True, slots=True)
class Softmax(Directed):
    """A softmax; the gradient reads dst."""

    kind: ClassVar[str] = "softmax"
    axis: int
    alg: str = "softmax_accurate"


@dataclass(eq=False, repr=False, kw_only=True, slots=True)
class Shuffle(Directed):
    """A shuffle of channels."""

    kind: ClassVar[str] = "shuffle"
    axis: int
    #: channels of one group; divides the axis. (PyTorch's ``channel_shuffle`` takes the number of groups instead.)
    group_size: int


@dataclass(eq=False, repr=False, kw_only=True, slots=True)
class Resampling(Directed):
    """A resampling of (N, C, spatial); without dst, the factors decide its dims."""

    kind: ClassVar[str] = "resampling"
    #: ``"resampling_nearest"`` or ``"resampling_linear"`` (half-pixel centres)
    alg: str
    #: dst size / src size per spatial axis. Default: from the dims.
    factors: Sequence[float] | None = None


@dataclass(eq=False, repr=False, kw_only=True, slots=True)
class Matmul(Problem):
    """A (batched) matrix product."""

    kind: ClassVar[str] = "matmul"
    #: `src`, `weights`, `dst`: (…, M, K), (…, K, N), (…, M, N); batch axes of size 1 broadcast
    src: NativeDesc
    weights: NativeDesc
    #: as many axes as dst, each with dst's size or 1
    bias: NativeDesc | None = None
    dst: NativeDesc


@dataclass(eq=False, repr=False, kw_only=True, slots=True)
class Binary(Problem):
    """An element-wise operation of two tensors, such as ``"binary_add"``; a size of 1 broadcasts."""

    kind: ClassVar[str] = "binary"
    src_0: NativeDesc
    src_1: NativeDesc
    dst: NativeDesc
    alg: str


@dataclass(eq=False, repr=False, kw_only=True, slots=True)
class Reduction(Problem):
    """A reduction along the axes that have size 1 in dst."""

    kind: ClassVar[str] = "reduction"
    src: NativeDesc
    dst: NativeDesc
    alg: str
    p: float = 0.0
    eps: float = 0.0


@dataclass(eq=False, repr=False, kw_only=True, slots=True)
class Reorder(Problem):
    """A copy from one concrete format or data type to another.

    >>> from fmtprop import dnnl
    >>> from fmtprop.layout import MemoryDesc
    >>> plain = dnnl.NativeDesc.from_desc(MemoryDesc((1, 16, 4, 4), "f32", tag="abcd"))
    >>> nhwc = dnnl.NativeDesc.from_desc(MemoryDesc((1, 16, 4, 4), "f32", tag="acdb"))
    >>> dnnl.create(dnnl.Reorder(src=plain, dst=nhwc)).kind
    'reorder'
    """

    kind: ClassVar[str] = "reorder"
    src: NativeDesc
    dst: NativeDesc


@dataclass(eq=False, repr=False, kw_only=True, slots=True)
class Concat(Problem):
    """A concatenation of one or more tensors in concrete formats; without dst, oneDNN chooses its format."""

    kind: ClassVar[str] = "concat"
    srcs: Sequence[NativeDesc]
    dst: NativeDesc | None = None
    #: axis along which the sources follow each other
    axis: int


@dataclass(eq=False, repr=False, kw_only=True, slots=True)
class Sum(Problem):
    """A weighted sum of one or more tensors in concrete formats; without dst, oneDNN chooses its format."""

    kind: ClassVar[str] = "sum"
    srcs: Sequence[NativeDesc]
    dst: NativeDesc | None = None
    #: one factor per source
    scales: Sequence[float]


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
