"""Linear layers that keep their weights as codes, in place of floating numbers.

Plans read the codes where they are in the module, so a model's weights are in memory once. Owns the change of a layer
to such a one; which matrices have codes, and which codes, is decided in
:mod:`~fmtprop.passes.precision.compress_weights`.
"""

from __future__ import annotations

import torch
from torch import nn

from fmtprop import dnnl
from fmtprop.ops.matmul_nbits import MatMulNBits, decoded, encoded
from fmtprop.passes.precision.compress_weights import BITS, group_of
from fmtprop.targets.memory import aligned_bytes

#: classes of linear layers -> whether the matrix is [depth, outputs]; transformers' is not imported for its name
_TURNED = {"torch.nn.modules.linear.Linear": False, "transformers.pytorch_utils.Conv1D": True}

#: bytes of floating weights that are dropped between two returns of memory to the system
_TRIM_NBYTES = 64 << 20


class CodedLinear(nn.Module):
    """A linear layer with codes; :func:`keep_codes` makes it of another, whose attributes it has, too."""

    codes: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None
    bits: int
    group: int
    turned: bool
    dtype: torch.dtype

    @property
    def weight(self) -> torch.Tensor:
        """The numbers that the codes stand for, shaped as the layer's weights were, in their data type."""
        tensors, depth = {"weights": self.codes, "scales": self.scales}, self.scales.shape[1] * self.group
        matrix = decoded(MatMulNBits(self.bits, self.group), tensors, depth).to(self.dtype)
        return matrix.t() if self.turned else matrix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product with these numbers."""
        product: torch.Tensor = torch.ops.fmtprop.matmul_nbits(
            x, self.codes, self.scales, None, self.bias, self.bits, self.group
        )
        return product

    def extra_repr(self) -> str:
        """Return the sizes."""
        outputs, groups = self.scales.shape
        return f"{groups * self.group}, {outputs}, bias={self.bias is not None}, bits={self.bits}, group={self.group}"


def keep_codes(model: nn.Module, weights: str) -> None:
    """Keep the weights of a model's linear layers as codes, and free the floating numbers, one layer after another."""
    #: weights, which layers may share -> their codes and scales; () for those with an infinity or NaN
    made: dict[int, tuple[torch.Tensor, ...]] = {}
    kept = 0
    for layer in list(model.modules()):
        weight, group = layer._parameters.get("weight"), _group_of(layer)
        if weight is None or group is None:
            continue
        turned = _TURNED[_class_of(layer)]
        if id(weight) not in made:
            codes, scales = encoded(weight.t() if turned else weight, BITS[weights], group)
            made[id(weight)] = (_aligned(codes), _aligned(scales)) if bool(scales.isfinite().all()) else ()
        if not made[id(weight)]:
            continue
        del layer.weight
        layer.__class__ = CodedLinear  # its place in the model, its hooks and its other attributes stay
        vars(layer).update(bits=BITS[weights], group=group, turned=turned, dtype=weight.dtype)
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


def _group_of(layer: nn.Module) -> int | None:
    """Return the numbers that share a scale; None for other layers than linear ones, and for matrices without codes."""
    weight = layer._parameters.get("weight")
    if _class_of(layer) not in _TURNED or type(weight) is not nn.Parameter or weight.device.type != "cpu":
        return None
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None
    outputs, depth = weight.shape[::-1] if _TURNED[_class_of(layer)] else weight.shape
    return group_of(outputs, depth)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same numbers where a plan can read them."""
    flat = aligned_bytes(tensor.nbytes)
    return flat.view(tensor.dtype).view(tensor.shape).copy_(tensor)
