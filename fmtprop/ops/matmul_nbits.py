"""Products with a matrix of 4- or 8-bit codes, and the decoding of such a matrix.

A code `q` of a group stands for ``(q - zero point) * scale``. Language models keep their weights so, since a step for
one token takes the time of reading them. A kernel of this project runs products of a few rows; for more rows,
:mod:`fmtprop.passes.precision.decode_weights` decodes the matrix in front of an ordinary product.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
import torch.nn.functional as F

from fmtprop.errors import ShapeError
from fmtprop.ir import Attrs, Call, Category, Cost, OpDef, Operand, Reads, Sample, TensorType, Value
from fmtprop.ir.facets import Absorbs, ByPyTorch, Numbers
from fmtprop.ir.tensors import data_type, torch_dtype
from fmtprop.layout import DataType

#: bits of a code -> data type of the bytes that hold codes, and the zero point of a group without one of its own
CODES = {4: (DataType.U8, 8.0), 8: (DataType.S8, 0.0)}

#: numbers of a matrix that are encoded or decoded together: 256 KB in f32, so that the results of the steps are in the
#: second cache, and none needs memory for a whole matrix
_BLOCK_SIZE: Final = 1 << 16

# ---------------------------------------------------------------- attributes


@dataclass(frozen=True)
class MatMulNBits(Attrs):
    """Attributes of a product with a matrix of codes.

    ONNX Runtime's contrib operators, "com.microsoft.MatMulNBits", for 4 bits; its 8-bit codes have no sign.
    """

    #: bits of a code: without sign, two to a byte and the first in its low half; or a signed byte
    bits: int = 4
    #: neighbouring codes of a row that share a scale and a zero point; the last group of a row may have fewer
    group: int = 32

    def __post_init__(self) -> None:
        if self.bits not in CODES:
            raise ShapeError(f"bits is {self.bits}; codes have {' or '.join(map(str, CODES))}")
        if self.group < 1 or self.group * self.bits % 8:
            raise ShapeError(f"group is {self.group}, but a group of {self.bits}-bit codes takes whole bytes")


@dataclass(frozen=True)
class DecodeNBits(MatMulNBits):
    """Attributes of the decoding of a matrix of codes."""

    each_run: ClassVar[bool] = True

    #: numbers of a row; the last group of a row may have more codes
    depth: int = 0
    dtype: str = "f32"


# ---------------------------------------------------------------- meaning


def infer(attrs: MatMulNBits, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the type of dst, [..., N], from src [..., K], weights [N, K * bits / 8] and scales [N, K / group]."""
    src, bias = types["src"], types.get("bias")
    if src.ndim < 1:
        raise ShapeError("src is a single number, but a product takes rows: [..., K]")
    outputs = check_codes(attrs, types, src.dims[-1])
    if bias is not None and bias.dims != (outputs,):
        raise ShapeError(f"bias has dims {bias.dims} but the {outputs} outputs need ({outputs},)")
    return (src.with_dims((*src.dims[:-1], outputs)),)


def infer_decoded(attrs: DecodeNBits, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the type of dst, [N, K]."""
    return (TensorType((check_codes(attrs, types, attrs.depth), attrs.depth), attrs.dtype),)


def check_codes(attrs: MatMulNBits, types: Mapping[str, TensorType], depth: int) -> int:
    """Return the number of rows of a matrix of codes."""
    weights, scales, zero_points = types["weights"], types["scales"], types.get("zero_points")
    dtype, _ = CODES[attrs.bits]
    groups = -(-depth // attrs.group)
    if weights.ndim != 2 or weights.dtype is not dtype:
        raise ShapeError(f"weights are {weights}, but {attrs.bits}-bit codes are a matrix of {dtype.value}")
    if weights.dims[1] != groups * attrs.group * attrs.bits // 8:
        raise ShapeError(
            f"weights axis 1 has {weights.dims[1]} bytes, but {depth} numbers in groups of {attrs.group} take "
            f"{groups * attrs.group * attrs.bits // 8}"
        )
    for name, type_ in (("scales", scales), ("zero_points", zero_points)):
        if type_ is not None and (type_.dims != (weights.dims[0], groups) or type_.dtype is not DataType.F32):
            raise ShapeError(
                f"{name} are {type_}, but {weights.dims[0]} rows of {groups} groups need as many f32 numbers"
            )
    return weights.dims[0]


def row_blocks(rows: int, depth: int) -> Iterator[slice]:
    """Yield slices of a matrix's rows, so that what is computed of one of them lies in cache."""
    # a trace has one block: it would have the steps of each
    step = max(1, rows if torch.compiler.is_compiling() else _BLOCK_SIZE // max(1, depth))
    for first in range(0, rows, step):
        yield slice(first, first + step)


def decoded(attrs: MatMulNBits, tensors: Mapping[str, torch.Tensor], depth: int) -> torch.Tensor:
    """Return the matrix that codes stand for, in f32."""
    codes, scales, zero_points = tensors["weights"], tensors["scales"], tensors.get("zero_points")
    if attrs.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    numbers = codes.view(codes.shape[0], -1, attrs.group).float()
    zero = CODES[attrs.bits][1] if zero_points is None else zero_points.unsqueeze(-1)
    return ((numbers - zero) * scales.unsqueeze(-1)).flatten(1)[:, :depth]


def _decoded_blocks(
    attrs: MatMulNBits, tensors: Mapping[str, torch.Tensor], depth: int, dtype: torch.dtype
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield some rows of the matrix that codes stand for, and the rows before them never again."""
    learned = {name: one for name in ("weights", "scales", "zero_points") if (one := tensors.get(name)) is not None}
    for block in row_blocks(tensors["weights"].shape[0], depth):
        yield block, decoded(attrs, {name: one[block] for name, one in learned.items()}, depth).to(dtype)


def reference(attrs: MatMulNBits, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch, in the data type of src."""
    src, bias = tensors["src"], tensors.get("bias")
    dst = src.new_empty((*src.shape[:-1], tensors["weights"].shape[0]))
    for block, weights in _decoded_blocks(attrs, tensors, src.shape[-1], src.dtype):
        dst[..., block] = F.linear(src, weights, None if bias is None else bias[block].to(src.dtype))
    return (dst,)


def reference_decoded(attrs: DecodeNBits, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch."""
    dtype = torch_dtype(DataType(attrs.dtype))
    dst = torch.empty((tensors["weights"].shape[0], attrs.depth), dtype=dtype)
    for block, weights in _decoded_blocks(attrs, tensors, attrs.depth, dtype):
        dst[block] = weights
    return (dst,)


# ---------------------------------------------------------------- encoding


def encoded(weights: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes and scales of a matrix [N, K], each number rounded to the nearest code.

    The number of largest magnitude of a group is a code exactly: -8 for 4 bits, with either sign of the scale, 127 or
    -127 for 8. A group of zeros has the scale 0.
    """
    rows, depth = weights.shape
    codes = torch.empty((rows, depth * bits // 8), dtype=torch_dtype(CODES[bits][0]))
    scales = torch.empty((rows, depth // group))
    for block in row_blocks(rows, depth):
        codes[block], scales[block] = _encoded(weights[block], bits, group)
    return codes, scales


def _encoded(weights: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    groups = weights.detach().float().reshape(weights.shape[0], -1, group)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    largest = torch.where(-low > high, low, high)
    scales = largest / -8.0 if bits == 4 else largest.abs() / 127.0
    numbers = (groups / torch.where(scales == 0, 1.0, scales)).round_().flatten(1)
    codes = numbers.clamp_(-127, 127) if bits == 8 else numbers.clamp_(-8, 7).add_(8)
    return _in_bytes(codes.to(torch_dtype(CODES[bits][0])), bits), scales.squeeze(-1)


def packed(numbers: torch.Tensor, zero_points: torch.Tensor) -> tuple[int, torch.Tensor, torch.Tensor | None] | None:
    """Return the bits, codes and zero points of integers of groups; None if a group's do not fit into 8 bits.

    `numbers`: integers [N, K], of any type. `zero_points`: what is subtracted from them, f32 [N, groups].
    """
    groups = numbers.reshape(*zero_points.shape, -1)
    low, high = groups.amin(-1).float(), groups.amax(-1).float()
    span = float((high - low).max())
    if not span <= 255:
        return None
    bits = 4 if span <= 15 else 8
    first, zero = (0.0, CODES[4][1]) if bits == 4 else (-128.0, CODES[8][1])
    last = first + 2**bits - 1
    # codes without zero points, if these are equal; else the least number of a group is the first code
    shift = zero - zero_points
    if not bool(((zero_points == zero_points.round()) & (low + shift >= first) & (high + shift <= last)).all()):
        shift = first - low
    rows, depth = numbers.shape
    codes = torch.empty((rows, depth * bits // 8), dtype=torch_dtype(CODES[bits][0]))
    for block in row_blocks(rows, depth):
        shifted = (groups[block] + shift[block].unsqueeze(-1)).flatten(1).to(codes.dtype)
        codes[block] = _in_bytes(shifted, bits)
    zero_points = zero_points + shift
    return bits, codes, None if bool((zero_points == zero).all()) else zero_points


def _in_bytes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes as they lie in memory."""
    return codes if bits == 8 else torch.add(codes[:, 0::2], codes[:, 1::2], alpha=16)


# ---------------------------------------------------------------- importer


@torch.library.custom_op("fmtprop::matmul_nbits", mutates_args=())
def matmul_nbits(
    src: torch.Tensor,
    weights: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    bias: torch.Tensor | None,
    bits: int,
    group: int,
) -> torch.Tensor:
    """Return the product as PyTorch computes it; a graph has it as one node."""
    given = {"src": src, "weights": weights, "scales": scales, "zero_points": zero_points, "bias": bias}
    return reference(MatMulNBits(bits, group), {name: one for name, one in given.items() if one is not None})[0]


@matmul_nbits.register_fake
def _(
    src: torch.Tensor, weights: torch.Tensor, scales: torch.Tensor, zero_points: object, bias: object, bits: int,
    group: int,
) -> torch.Tensor:  # fmt: skip
    return src.new_empty((*src.shape[:-1], weights.shape[0]))


def _import(call: Call) -> Value | None:
    given = {name: call[name] for name in ("src", "weights", "scales", "zero_points", "bias")}
    return call.emit("matmul_nbits", given, MatMulNBits(call["bits"], call["group"]))


@torch.library.custom_op("fmtprop::decode_nbits", mutates_args=())
def decode_nbits(
    weights: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    bits: int,
    group: int,
    depth: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the matrix as PyTorch computes it; a graph has this as one node."""
    given = {"weights": weights, "scales": scales, "zero_points": zero_points}
    attrs = DecodeNBits(bits, group, depth, data_type(dtype).value)
    return reference_decoded(attrs, {name: one for name, one in given.items() if one is not None})[0]


@decode_nbits.register_fake
def _(
    weights: torch.Tensor, scales: object, zero_points: object, bits: int, group: int, depth: int, dtype: torch.dtype
) -> torch.Tensor:
    return weights.new_empty((weights.shape[0], depth), dtype=dtype)


def _import_decoding(call: Call) -> Value | None:
    given = {name: call[name] for name in ("weights", "scales", "zero_points")}
    return call.emit(
        "decode_nbits", given, DecodeNBits(call["bits"], call["group"], call["depth"], call["dtype"].value)
    )


# ---------------------------------------------------------------- samples and declarations


def types_of_codes(attrs: MatMulNBits, outputs: int, depth: int) -> dict[str, TensorType]:
    """Return the types of a matrix's codes and scales."""
    groups = -(-depth // attrs.group)
    codes = TensorType((outputs, groups * attrs.group * attrs.bits // 8), CODES[attrs.bits][0])
    return {"weights": codes, "scales": TensorType((outputs, groups))}


def samples() -> Iterable[Sample]:
    """Yield a few rows and more, both widths, with and without zero points and bias, with a short last group."""
    for name, rows, outputs, depth, attrs, optional in (
        ("one_row", (1,), 37, 64, MatMulNBits(4, 32), ()),
        ("tokens", (2, 3), 48, 256, MatMulNBits(4, 128), ("zero_points", "bias")),
        ("bytes", (1, 1), 40, 128, MatMulNBits(8, 128), ("bias",)),
        ("bytes_in_groups", (4,), 33, 96, MatMulNBits(8, 32), ("zero_points",)),
        ("short_group", (2,), 16, 40, MatMulNBits(4, 32), ()),
        ("many_rows", (19,), 17, 64, MatMulNBits(8, 64), ()),
    ):
        types = {"src": TensorType((*rows, depth)), **types_of_codes(attrs, outputs, depth)}
        more = {"zero_points": types["scales"], "bias": TensorType((outputs,))}
        yield Sample(name, attrs, {**types, **{one: more[one] for one in optional}})


def samples_decoded() -> Iterable[Sample]:
    """Yield matrices of both widths."""
    for name, outputs, attrs in (
        ("nibbles", 7, DecodeNBits(4, 32, 96)),
        ("bytes", 5, DecodeNBits(8, 64, 128, "bf16")),
        ("short_group", 3, DecodeNBits(4, 32, 40)),
    ):
        yield Sample(name, attrs, types_of_codes(attrs, outputs, attrs.depth))


#: operands of a matrix of codes
CODES_OPERANDS = (
    Operand("weights", "", parameter=True),
    Operand("scales", "", parameter=True),
    Operand("zero_points", "", optional=True, parameter=True),
)

#: operations for an element: a code is shifted, converted, shifted by its zero point and scaled
_DECODING = 4.0

MATMUL_NBITS = OpDef(
    name="matmul_nbits",
    attrs=MatMulNBits,
    operands=(Operand("src", ""), *CODES_OPERANDS, Operand("bias", "", optional=True, parameter=True)),
    category=Category.BANDWIDTH,
    infer=infer,
    reference=reference,
    numbers=Numbers(spreads=True),
    cost=Cost(pytorch=0.02),
    pytorch=ByPyTorch(reads=Reads.ROWS, any_strides=lambda attrs: False),
    absorbs=Absorbs(frozenset({"eltwise", "binary", "sum"})),
    short="fc",
    samples=samples,
    torch={"fmtprop.matmul_nbits.default": _import},
)

DECODE_NBITS = OpDef(
    name="decode_nbits",
    attrs=DecodeNBits,
    # the codes are its source, not a parameter: their format decides
    operands=(Operand("weights", ""), *CODES_OPERANDS[1:]),
    category=Category.BANDWIDTH,
    infer=infer_decoded,
    reference=reference_decoded,
    numbers=Numbers(spreads=True),
    cost=Cost(lambda attrs, gathered: _DECODING, pytorch=0.05),
    pytorch=ByPyTorch(reads=Reads.ROWS, any_strides=lambda attrs: False),
    short="decode",
    samples=samples_decoded,
    torch={"fmtprop.decode_nbits.default": _import_decoding},
)
