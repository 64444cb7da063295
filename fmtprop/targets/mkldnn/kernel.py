"""What a step of this target calls: a function of torch tensors, which gives new ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from fmtprop.ir.node import Node
from fmtprop.ir.tensors import torch_dtype
from fmtprop.layout import MemoryDesc
from fmtprop.passes.assign import result_names
from fmtprop.targets.executable import Bound, Executable, Implementation, Place, Provider, Stream
from fmtprop.targets.mkldnn.formats import packing_of

__all__ = ["Kernel"]


@dataclass(frozen=True)
class Kernel(Implementation):
    """A way to compute a node from torch tensors.

    Parameters
    ----------
    call : callable
        Takes the operands in the order of the candidate's operands; gives a new tensor, or several.
    residual_operand : str, optional
        An operand that ``call_into`` overwrites with the result: it adds into it.
    call_into : callable, optional
        Like ``call``, in place.
    may_share : bool
        Whether a result may be an operand, or a view of one: then it is copied.
    """

    call: Callable[..., Any]
    residual_operand: str | None = None
    call_into: Callable[..., Any] | None = None
    may_share: bool = False

    makes_results = True
    identity = MappingProxyType({"torch": torch.__version__})

    @property
    def repro(self) -> str:
        """In words: there is no program for it."""
        return "the operator on the same numbers in these formats, and the op's reference on them"

    def target(self) -> Provider:
        """Return a target of this kind."""
        from fmtprop.targets.mkldnn.target import MkldnnTarget  # which offers these

        return MkldnnTarget()

    def build(self, threads: int) -> Executable:
        """Return what calls it; PyTorch's operators ask for the number of threads themselves."""
        return _Executable(self)

    def may_add_to(self, node: Node) -> str | None:
        """Return the operand that it can add to in place."""
        return self.residual_operand

    def needs_check(self, node: Node) -> bool:
        """Say whether it is more than a copy, of numbers with a tolerance."""
        return node.op != "reorder" and all(type_.dtype.is_floating for type_ in node.results)


class _Executable(Executable):
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def bind(self, node: Node, places: Mapping[str, Place], stream: Stream) -> Bound:
        kernel, names = self._kernel, () if node.choice is None else tuple(node.choice.operands)
        read = tuple(places[name] for name in names)
        written = tuple(places[name].memory for name in result_names(node))
        call = kernel.call
        overwritten = kernel.residual_operand
        if kernel.call_into is not None and overwritten is not None and places[overwritten].memory is written[0]:
            call = kernel.call_into
        laid_out = tuple(None if desc.kind == "opaque" else desc for desc in node.descs)

        def run() -> None:
            tensors = [place.tensor() for place in read]
            results = call(*tensors)
            found = results if isinstance(results, tuple) else (results,)
            shared = {t.untyped_storage().data_ptr() for t in tensors if not t.is_mkldnn} if kernel.may_share else ()
            for memory, result, desc in zip(written, found, laid_out, strict=True):
                if desc is not None and not (_lies_as(result, desc) and not _is_among(result, shared)):
                    result = _copy(result, desc)
                memory.put(result)

        return Bound(python=(node, run))

    def lay_out(self, node: Node, name: str, tensor: torch.Tensor) -> torch.Tensor:
        recipe: Any = None if node.choice is None else packing_of(node.choice.operands[name])
        laid_out: torch.Tensor = tensor.to_mkldnn() if recipe is None else recipe.pack(tensor)
        return laid_out


def _lies_as(tensor: torch.Tensor, desc: MemoryDesc) -> bool:
    """Whether a tensor of the descriptor's dimensions has its strides."""
    strides = tensor.stride()
    return strides == desc.strides or all(
        size == 1 or a == b for size, a, b in zip(desc.dims, strides, desc.strides, strict=True)
    )


def _is_among(tensor: torch.Tensor, storages: Collection[int]) -> bool:
    return bool(storages) and tensor.untyped_storage().data_ptr() in storages


def _copy(tensor: torch.Tensor, desc: MemoryDesc) -> torch.Tensor:
    return torch.empty_strided(desc.dims, desc.strides, dtype=torch_dtype(desc.dtype), device="cpu").copy_(tensor)
