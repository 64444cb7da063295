"""Attention as one op: softmax(query · key · scale + masks) · value.

Models have it as two products with a softmax between them; :mod:`fmtprop.passes.variants.attention_fusion` finds this
pattern, and :mod:`fmtprop.passes.rewrites.few_queries` finds a decoder's steps. It runs in kernels of this project or
in PyTorch, as oneDNN has no primitive for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, prod
from typing import TypeVar

import torch

from fmtprop.errors import ShapeError
from fmtprop.ir import Attrs, Category, Linear, OpDef, Operand, Sample, TensorType
from fmtprop.ir.facets import Numbers
from fmtprop.layout import DataType
from fmtprop.ops.building import operand_list

T = TypeVar("T")

# ---------------------------------------------------------------- attributes


@dataclass(frozen=True)
class Attention(Attrs):
    """Attributes of attention.

    Vaswani et al., "Attention Is All You Need", 2017, section 3.2.1.
    """

    #: factor of the products of queries and keys
    scale: float = 1.0
    #: query i has weights for keys up to i + limit, at least one; 0 is the causal mask of as many keys as queries.
    #: None: for all keys.
    limit: int | None = None
    #: lower bound of masked scores: with it, a query without visible keys gets an average, not NaN
    lowest: float = -inf
    #: whether a query without visible keys, with -inf for all scores, has the result 0, not NaN
    blanks: bool = False

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 0:
            raise ShapeError(f"attention: limit is {self.limit}, so the first query has no key; it must be at least 0")


# ---------------------------------------------------------------- meaning


def infer(attrs: Attention, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the type of dst, [..., M, V].

    ``src`` is [..., M, K], ``key`` [..., K, N], ``value`` [..., N, V]; a batch axis of key and value may have the size
    1, if heads share them. Each mask has as many axes, each of the size of the scores [..., M, N] or 1, and N numbers
    along the last one. ``past_key`` [..., K, P] and ``past_value`` [..., P, V] precede them: then the scores have P + N
    columns. Any of these may be codes, s8, with a scale of src's data type for each key or value: ``key_scales``
    [..., 1, N], ``value_scales`` [..., N, 1].
    """
    src, columns = types["src"], 0
    _check_codes(types)
    for key, value in _parts(types):
        if not src.ndim == key.ndim == value.ndim >= 3:
            ndims = f"{src.ndim}, {key.ndim} and {value.ndim}"
            raise ShapeError(f"src, key and value have {ndims} axes; all need the same, 3+")
        batch = key.dims[:-2]
        if batch != value.dims[:-2] or any(k not in (1, s) for k, s in zip(batch, src.dims[:-2], strict=True)):
            given = f"src {src.dims}, key {key.dims} and value {value.dims}"
            raise ShapeError(f"the batch axes of {given}: those of key and value must be equal, each src's or 1")
        width = types["value"].dims[-1]
        if src.dims[-1] != key.dims[-2] or key.dims[-1] != value.dims[-2] or value.dims[-1] != width:
            raise ShapeError(f"src {src.dims}, key {key.dims} and value {value.dims} are no matrices of one product")
        columns += key.dims[-1]
    scores = (*src.dims[:-1], columns)
    for mask in operand_list("mask", types):
        fits = mask.ndim == src.ndim and all(m in (1, s) for m, s in zip(mask.dims, scores, strict=True))
        if not fits or mask.dims[-1] != scores[-1]:
            raise ShapeError(f"a mask has dims {mask.dims} but the scores {scores} need as many axes, the same or 1")
    return (src.with_dims((*src.dims[:-1], value.dims[-1])),)


def _check_codes(types: Mapping[str, TensorType]) -> None:
    """Require scales for the keys and values that are codes, one for each, and for no others."""
    for name in (f"{part}{kind}" for part in ("past_", "") for kind in ("key", "value")):
        if name not in types:
            continue
        codes, scales, src = types[name], types.get(f"{name}_scales"), types["src"]
        if (codes.dtype is DataType.S8) != (scales is not None):
            raise ShapeError(f"{name} is {codes.dtype}; codes are s8 and have scales, {name}_scales, others have none")
        axis = -2 if name.endswith("key") else -1
        dims = list(codes.dims)
        dims[axis] = 1
        if scales is not None and (scales.dtype, list(scales.dims)) != (src.dtype, dims):
            raise ShapeError(
                f"{name}_scales is {scales}; it must be {src.dtype} of {tuple(dims)}, a scale for each {name}"
            )


def reference(attrs: Attention, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch; scores and weights have the precision of f32 at least."""
    src = tensors["src"]
    dtype = torch.promote_types(src.dtype, torch.float32)
    decoded = {
        name: tensor.to(src.dtype) * tensors[f"{name}_scales"] if f"{name}_scales" in tensors else tensor
        for name, tensor in tensors.items()
    }
    keys, values = zip(*_parts(decoded), strict=True)
    scores = torch.matmul(src.to(dtype), torch.cat(keys, -1).to(dtype)) * attrs.scale
    for mask in operand_list("mask", tensors):
        scores = scores + mask.to(dtype)
    scores = scores.clamp_min(attrs.lowest)
    if attrs.limit is not None:
        scores = scores + torch.full(scores.shape[-2:], -torch.inf, dtype=dtype).triu(attrs.limit + 1)
    weights = scores.softmax(-1)
    if attrs.blanks:
        weights = weights.masked_fill((scores == -inf).all(-1, keepdim=True), 0.0)
    return (torch.matmul(weights, torch.cat(values, -2).to(dtype)).to(src.dtype),)


def _parts(operands: Mapping[str, T]) -> list[tuple[T, T]]:
    """Return the keys and values of earlier tokens, if there are any, and the new ones."""
    return [(operands[f"{p}key"], operands[f"{p}value"]) for p in ("past_", "") if f"{p}key" in operands]


def loses(attrs: Attention) -> frozenset[str]:
    """Return the special values that differ: a value of weight 0 that is not finite."""
    return frozenset({"nan", "inf"})


# ---------------------------------------------------------------- samples and declaration


def _problem(
    batch: tuple[int, ...], rows: int, keys: int, depth: int, width: int, *masks: tuple[int, ...], past: int = 0
) -> dict[str, TensorType]:
    shapes = {"src": (*batch, rows, depth), "key": (*batch, depth, keys), "value": (*batch, keys, width)}
    shapes |= {f"mask_{number}": mask for number, mask in enumerate(masks)}
    if past:
        shapes |= {"past_key": (*batch, depth, past), "past_value": (*batch, past, width)}
    return {name: TensorType(dims) for name, dims in shapes.items()}


def _coded(types: dict[str, TensorType], *names: str) -> dict[str, TensorType]:
    """Return a problem in which some operands are codes."""
    scales = {}
    for name in names:
        *batch, rows, columns = types[name].dims
        scales[f"{name}_scales"] = TensorType((*batch, 1, columns) if name.endswith("key") else (*batch, rows, 1))
    return types | {name: types[name].with_dtype(DataType.S8) for name in names} | scales


def samples() -> Iterable[Sample]:
    """Yield heads with tails, causal ones, and masks of every kind."""
    yield Sample("heads", Attention(0.25), _problem((2, 3), 33, 20, 16, 16))
    yield Sample("odd", Attention(0.5), _problem((1, 2), 17, 13, 7, 19))
    yield Sample("three_axes", Attention(), _problem((3,), 10, 12, 16, 24))
    yield Sample("causal", Attention(0.25, 0), _problem((1, 2), 37, 37, 16, 16))
    yield Sample("cached", Attention(0.25, 5), _problem((1, 2), 20, 25, 16, 16))
    yield Sample("padding", Attention(0.25), _problem((2, 2), 9, 11, 16, 16, (2, 1, 1, 11)))
    yield Sample("lowest", Attention(0.25, None, -0.25), _problem((1, 2), 18, 11, 16, 16))
    yield Sample("masks", Attention(0.25), _problem((2, 2), 9, 11, 16, 16, (1, 2, 9, 11), (2, 1, 9, 11)))
    yield Sample("step", Attention(0.25), _problem((2, 3), 1, 1, 32, 48, (2, 1, 1, 21), past=20))
    yield Sample("blanks", Attention(0.5, blanks=True), _problem((2, 2), 1, 7, 16, 16, (2, 1, 1, 7)))
    shared = _problem((1, 2, 1), 2, 3, 16, 16, (1, 1, 1, 2, 8), past=5)
    yield Sample("codes", Attention(0.5), _coded(_problem((1, 2), 2, 9, 16, 32), "key", "value"))
    yield Sample(
        "earlier_codes", Attention(0.5), _coded(_problem((2,), 1, 1, 16, 16, past=9), "past_key", "past_value")
    )
    yield Sample("heads_of_a_group", Attention(0.5), shared | {"src": TensorType((1, 2, 3, 2, 16))})


ATTENTION = OpDef(
    name="attention",
    attrs=Attention,
    operands=(
        Operand("src", "SRC"),
        Operand("key", "WEIGHTS"),
        Operand("value", "WEIGHTS_LAYER"),
        Operand("mask", "MULTIPLE_SRC", optional=True, variadic=True),
        Operand("past_key", "", optional=True),
        Operand("past_value", "", optional=True),
        *(Operand(f"{name}_scales", "", optional=True) for name in ("key", "value", "past_key", "past_value")),
    ),
    category=Category.BANDWIDTH,
    infer=infer,
    reference=reference,
    linear=Linear(
        lambda src, key, dst: float(key[-1] * (prod(src) + prod(dst))), by_columns=True, roles=("src", "key", "dst")
    ),
    numbers=Numbers(spreads=True, loses=loses),
    samples=samples,
)
