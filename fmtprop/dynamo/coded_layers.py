"""Layers that keep their weights as codes, in place of floating numbers: linear layers, embeddings and experts.

Plans read the codes where they are in the module, so a model's weights are in memory once. Owns the change of a layer
to such a one; which matrices have codes, and which codes, is decided in
:mod:`~fmtprop.passes.precision.compress_weights`.
"""

from __future__ import annotations

import torch
from torch import nn

from fmtprop import dnnl
from fmtprop.dynamo.coded_experts import is_experts, keep_codes_of_experts
from fmtprop.ops.matmul_nbits import MatMulNBits, decoded, encoded
from fmtprop.passes.precision.compress_weights import BITS, group_of
from fmtprop.targets.memory import aligned

#: classes of linear layers -> whether the matrix is [depth, outputs]; transformers' is not imported for its name
_TURNED = {"torch.nn.modules.linear.Linear": False, "transformers.pytorch_utils.Conv1D": True}

#: bytes of floating weights that are dropped between two returns of memory to the system
_TRIM_NBYTES = 64 << 20


class _CodedLayer(nn.Module):
    """A layer with codes; :func:`keep_codes` makes it of another, whose attributes it has, too."""

    codes: torch.Tensor
    scales: torch.Tensor
    bits: int
    group: int
    turned: bool
    dtype: torch.dtype

    @property
    def weight(self) -> torch.Tensor:
        """The numbers that the codes stand for, shaped as the layer's weights were, in their data type."""
        tensors = {"weights": self.codes, "scales": self.scales}
        matrix = decoded(MatMulNBits(self.bits, self.group), tensors, self.depth).to(self.dtype)
        return matrix.t() if self.turned else matrix

    @property
    def depth(self) -> int:
        """Numbers of a row of the matrix."""
        return self.scales.shape[1] * self.group


class CodedLinear(_CodedLayer):
    """A linear layer with codes."""

    bias: torch.Tensor | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product with these numbers."""
        product: torch.Tensor = torch.ops.fmtprop.matmul_nbits(
            x, self.codes, self.scales, None, self.bias, self.bits, self.group
        )
        return product

    def extra_repr(self) -> str:
        """Return the sizes."""
        bias = self.bias is not None
        return f"{self.depth}, {self.scales.shape[0]}, bias={bias}, bits={self.bits}, group={self.group}"


class CodedEmbedding(_CodedLayer, nn.Embedding):  # type: ignore[override]  # its weight is computed
    """An embedding with codes."""

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """Return rows of these numbers."""
        how = self.bits, self.group, self.depth, self.dtype
        rows: torch.Tensor = torch.ops.fmtprop.gather_nbits(self.codes, self.scales, None, indices, *how)
        return rows

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"{self.scales.shape[0]}, {self.depth}, bits={self.bits}, group={self.group}"


def keep_codes(model: nn.Module, weights: str | None, embeddings: str | None = None) -> None:
    """Keep the weights of a model's linear layers and experts as codes, and the tables of its embeddings, where asked.

    Floating numbers are freed one layer after another. A linear layer that has the table of an embedding shares its
    codes.
    """
    tables = {id(layer._parameters.get("weight")) for layer in model.modules() if _is_embedding(layer)}
    #: weights, which layers may share -> their codes and scales; () for those with an infinity or NaN
    made: dict[int, tuple[torch.Tensor, ...]] = {}
    kept = 0
    for layer in list(model.modules()):
        if weights is not None and is_experts(layer):
            kept += keep_codes_of_experts(layer, BITS[weights])
        weight, group = layer._parameters.get("weight"), _group_of(layer)
        wanted = embeddings if embeddings is not None and id(weight) in tables else weights
        if weight is None or group is None or wanted is None or (embeddings is None and _is_embedding(layer)):
            continue
        turned, bits = _TURNED.get(_class_of(layer), False), BITS[wanted]
        if id(weight) not in made:
            codes, scales = encoded(weight.t() if turned else weight, bits, group)
            made[id(weight)] = (aligned(codes), aligned(scales)) if bool(scales.isfinite().all()) else ()
        if not made[id(weight)]:
            continue
        del layer.weight
        # its place in the model, its hooks and its other attributes stay
        layer.__class__ = _embedding_with_codes(type(layer)) if _is_embedding(layer) else CodedLinear
        vars(layer).update(bits=bits, group=group, turned=turned, dtype=weight.dtype)
        for name, tensor in zip(("codes", "scales"), made[id(weight)], strict=True):
            layer.register_buffer(name, tensor)
        kept += weight.nbytes
        if kept > _TRIM_NBYTES:
            kept = 0
            del weight
            dnnl.trim_heap()
    dnnl.trim_heap()
    model.requires_grad_(False)


def _class_of(layer: nn.Module) -> str:
    return f"{type(layer).__module__}.{type(layer).__qualname__}"


def _is_embedding(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Embedding) and layer.max_norm is None  # a row that is read would be changed


def _embedding_with_codes(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the form with codes of an embedding's class, whose own forward pass, such as a scaling, calls theirs."""
    return CodedEmbedding if kind is nn.Embedding else type(f"Coded{kind.__name__}", (kind, CodedEmbedding), {})


def _group_of(layer: nn.Module) -> int | None:
    """Return the numbers that share a scale; None for layers of other kinds, and for matrices without codes."""
    weight, turned = layer._parameters.get("weight"), _TURNED.get(_class_of(layer))
    if turned is None and not _is_embedding(layer):
        return None
    if type(weight) is not nn.Parameter or weight.device.type != "cpu":
        return None
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None
    outputs, depth = weight.shape[::-1] if turned else weight.shape
    return group_of(outputs, depth)
