"""Implementation of this target's steps: a function of torch tensors, which returns new tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from fmtprop.ir import Node, opdef, result_names
from fmtprop.targets.bound import Bound, OwnStream, Place
from fmtprop.targets.executable import Executable, Implementation, Provider
from fmtprop.targets.memory import laid_out
from fmtprop.targets.mkldnn.formats import packing_of


@dataclass(frozen=True)
class TorchFunction(Implementation):
    """A way to compute a node from torch tensors."""

    #: takes the operands in the order of the candidate's operands; returns a new tensor, or several
    call: Callable[..., Any]
    #: an operand that ``call_into`` overwrites with the result: it adds into it
    residual_operand: str | None = None
    call_into: Callable[..., Any] | None = None
    #: whether a result may be an operand or a view of one; such a result is copied
    may_share: bool = False
    takes_any_numbers: bool = False

    #: makes the target that offers such functions, which sets this
    offered_by: ClassVar[Callable[[], Provider]]
    makes_results = True
    identity = MappingProxyType({"torch": torch.__version__})

    @property
    def repro(self) -> str:
        """A description in words: there is no program that repeats it."""
        return "the operator on the same numbers in these formats, and the op's reference on them"

    def target(self) -> Provider:
        """Return a target of this kind."""
        return type(self).offered_by()

    def build(self, threads: int) -> Executable:
        """Return the executable; PyTorch's operators find the number of threads themselves."""
        return _FunctionExecutable(self)

    def may_add_to(self, node: Node) -> str | None:
        """Return the operand that it can add to in place."""
        return self.residual_operand

    def needs_check(self, node: Node) -> bool:
        """Return whether it is more than a copy, a check may choose its numbers, and their type has a tolerance."""
        if node.op == "reorder" or not opdef(node.op).numbers.checkable(node.attrs):
            return False
        return all(type_.dtype.is_floating for type_ in node.results)


class _FunctionExecutable(Executable):
    def __init__(self, kernel: TorchFunction) -> None:
        self._kernel = kernel

    def bind(self, node: Node, places: Mapping[str, Place], stream: OwnStream) -> Bound:
        kernel, names = self._kernel, () if node.choice is None else tuple(node.choice.operands)
        # values that are the same in each run are looked up once
        read = tuple((places[name], places[name].tensor() if places[name].memory.is_fixed else None) for name in names)
        written = tuple(places[name].memory for name in result_names(node))
        call, several = kernel.call, len(written) > 1
        overwritten = kernel.residual_operand
        if kernel.call_into is not None and overwritten is not None and places[overwritten].memory is written[0]:
            call = kernel.call_into
        formats = [desc if desc.is_plain else None for desc in node.descs]

        def run_simply() -> None:
            result = call(*[place.tensor() if known is None else known for place, known in read])
            written[0].put(result if result.stride() == strides else laid_out(result, formats[0]))

        def run() -> None:
            tensors = [place.tensor() if known is None else known for place, known in read]
            results = call(*tensors)
            given = {t.untyped_storage().data_ptr() for t in tensors if not t.is_mkldnn} if kernel.may_share else ()
            for memory, desc, result in zip(written, formats, results if several else (results,), strict=True):
                is_shared = bool(given) and result.untyped_storage().data_ptr() in given
                memory.put(laid_out(result.clone() if is_shared else result, desc))

        is_simple = not several and not kernel.may_share and formats[0] is not None
        strides = node.descs[0].strides if is_simple else ()
        return Bound(python=(node, [run_simply if is_simple else run]))

    def lay_out(self, node: Node, name: str, tensor: torch.Tensor) -> torch.Tensor:
        desc = None if node.choice is None else node.choice.operands[name]
        recipe: Any = None if desc is None else packing_of(desc)
        given: torch.Tensor = tensor.to_mkldnn() if recipe is None else recipe.pack(tensor)
        return given
