"""Rotary position embedding: pairs of numbers of a row are turned by an angle that depends on the row's position.

oneDNN has none. A kernel of this project runs it, or PyTorch. Models write it out;
:mod:`fmtprop.passes.rewrites.recognise_rotary` finds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from fmtprop.errors import ShapeError
from fmtprop.ir import Attrs, Category, Cost, OpDef, Operand, Sample, TensorType

# ---------------------------------------------------------------- attributes


@dataclass(frozen=True)
class RotaryEmbedding(Attrs):
    """Attributes of a rotary embedding.

    ``apply_rotary_pos_emb`` of ``transformers.models.llama.modeling_llama`` and, interleaved, of
    ``transformers.models.gptj.modeling_gptj``; ONNX, "RotaryEmbedding".
    """

    #: whether number 2 i of a row forms a pair with number 2 i + 1; otherwise number i with number i + D/2
    interleaved: bool = False


# ---------------------------------------------------------------- meaning


def infer(attrs: RotaryEmbedding, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the type of src, [..., D]."""
    src = types["src"]
    if src.ndim < 1 or src.dims[-1] % 2:
        raise ShapeError(f"src has dims {src.dims}, but a rotary embedding takes rows of an even number of elements")
    for name in ("cos", "sin"):
        dims = types[name].dims
        fits = len(dims) == src.ndim and dims[-1] == src.dims[-1]
        if not fits or any(size not in (1, whole) for size, whole in zip(dims, src.dims, strict=True)):
            raise ShapeError(
                f"{name} has dims {dims}, but src of dims {src.dims} needs rows of {src.dims[-1]} elements, and other "
                "dims that are 1 or as those of src"
            )
    return (src,)


def reference(attrs: RotaryEmbedding, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch, in the data type of src; bf16 and f16 are turned in f32."""
    src = tensors["src"]
    wide = src.to(torch.promote_types(src.dtype, torch.float32))
    if attrs.interleaved:
        crossed = torch.stack([-wide[..., 1::2], wide[..., ::2]], dim=-1).flatten(-2)
    else:
        first, second = wide.chunk(2, dim=-1)
        crossed = torch.cat([-second, first], dim=-1)
    turned = wide * tensors["cos"] + crossed * tensors["sin"]
    return (turned.to(src.dtype),)


# ---------------------------------------------------------------- samples and declaration


def samples() -> Iterable[Sample]:
    """Yield heads of several sizes, with angles for all sequences of a batch or for each."""
    for name, dims, angles in (
        ("heads", (2, 3, 9, 64), (1, 1, 9, 64)),
        ("one_token", (1, 12, 1, 64), (1, 1, 1, 64)),
        ("angles_of_each_sequence", (3, 2, 5, 32), (3, 1, 5, 32)),
        ("tokens_before_heads", (1, 7, 4, 48), (1, 7, 1, 48)),
        ("odd_half", (2, 5, 14), (1, 5, 14)),
    ):
        types = {"src": TensorType(dims), "cos": TensorType(angles), "sin": TensorType(angles)}
        yield Sample(name, RotaryEmbedding(), types)
        yield Sample(f"{name}_interleaved", RotaryEmbedding(interleaved=True), types)


ROTARY_EMBEDDING = OpDef(
    name="rotary_embedding",
    attrs=RotaryEmbedding,
    operands=(Operand("src", "SRC"), *(Operand(name, "", wide=True) for name in ("cos", "sin"))),
    category=Category.BANDWIDTH,
    infer=infer,
    reference=reference,
    cost=Cost(lambda attrs, gathered: 3.0, pytorch=0.15),
    inplace=frozenset({"src"}),
    short="rotary",
    samples=samples,
)
