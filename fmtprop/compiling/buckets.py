"""Buckets: sizes that calls are padded to, so that a few plans serve many sizes.

Owns the padding of inputs and the cutting of results. Whether a model gives the same results on padded inputs, the
caller of this module checks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, TensorArgument

from fmtprop.capture.fx_import import results_of
from fmtprop.capture.specialise import Sizes
from fmtprop.errors import InputError, UnsupportedOpError

#: sizes of calls whose padding is remembered
_MOST_KNOWN = 4096

#: input -> axis -> sizes
Given = Mapping[str, Mapping[int, Sequence[int]]]


@dataclass(frozen=True)
class Padding:
    """The padding of a call."""

    inputs: tuple[tuple[int, ...], ...]
    #: shapes of the results without padding
    results: tuple[tuple[int, ...], ...]

    def pad(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the inputs with zeros behind them."""
        return [_padded(tensor, shape) for tensor, shape in zip(inputs, self.inputs, strict=True)]

    def cut(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the results without what belongs to the padding."""
        return [r[tuple(map(slice, shape))].contiguous() for r, shape in zip(results, self.results, strict=True)]


class Buckets:
    """The sizes that calls of a model are padded to.

    `given`: the sizes, by input and axis. All axes that have the same size in every call are padded together. Raises
    UnsupportedOpError if the model returns a size, which padding would change.
    """

    def __init__(self, program: ExportedProgram, given: Given) -> None:
        self._allowed = Sizes(program)
        self._inputs = dict(self._allowed.inputs)
        self._results = _results(program)
        self._check_bound()
        self._sizes: dict[Any, list[int]] = {}
        for name, axes in _mapping(given, "buckets", "inputs to axes").items():
            for axis, sizes in _mapping(axes, f"buckets: input {name}", "axes to sizes").items():
                self._sizes[self._symbol(name, axis)] = _sorted(name, axis, sizes)
        self._known = lru_cache(_MOST_KNOWN)(self._padding)

    def padding(self, inputs: Sequence[torch.Tensor]) -> Padding | None:
        """Return the padding of a call; None if it has the sizes of buckets, is larger than all, or is no call.

        Raises InputError if the model was not exported for these sizes.
        """
        if not all(isinstance(one, torch.Tensor) for one in inputs):
            return None
        return self._known(tuple(tuple(one.shape) for one in inputs))

    def sizes(self, examples: Sequence[torch.Tensor]) -> dict[str, list[Sequence[int]]]:
        """Return the sizes of each axis of each input: those of its buckets, or the example's."""
        return {
            name: [
                self._sizes.get(None if isinstance(size, int) else size.node.expr) or [number]
                for size, number in zip(recorded.shape, example.shape, strict=True)
            ]
            for (name, recorded), example in zip(self._inputs.items(), examples, strict=True)
        }

    def _check_bound(self) -> None:
        """Refuse sizes that are only known as a multiple of an unknown one, or the like."""
        sizes: list[Any] = [size for one in self._inputs.values() for size in one.shape if not isinstance(size, int)]
        bound = {size.node.expr for size in sizes if _is_symbol(size)}
        for size in sizes:
            if not size.node.expr.free_symbols <= bound:
                raise InputError(f"buckets: no input has the size of which {size} depends, so it cannot be padded")

    def _symbol(self, name: str, axis: int) -> Any:
        if name not in self._inputs:
            raise InputError(f"buckets: there is no input {name!r}; the inputs are {', '.join(self._inputs)}")
        shape = self._inputs[name].shape
        size: Any = shape[axis] if axis in range(-len(shape), len(shape)) else 0
        if not _is_symbol(size):
            raise InputError(
                f"buckets: input {name} axis {axis}: dynamic_shapes does not mark it as a size of its own that changes"
            )
        return size.node.expr

    def _padding(self, shapes: tuple[tuple[int, ...], ...]) -> Padding | None:
        self._allowed.check([torch.empty(shape, device="meta") for shape in shapes])
        numbers: dict[Any, int] = {}
        for recorded, shape in zip(self._inputs.values(), shapes, strict=True):
            sizes: list[tuple[Any, int]] = list(zip(recorded.shape, shape, strict=True))
            for symbol, size in sizes:
                if _is_symbol(symbol):
                    numbers[symbol.node.expr] = size
        buckets = {symbol: _next(self._sizes.get(symbol, ()), size) for symbol, size in numbers.items()}
        if buckets == numbers:
            return None
        padded = tuple(_numbers(recorded.shape, buckets) for recorded in self._inputs.values())
        return Padding(padded, tuple(_numbers(recorded.shape, numbers) for recorded in self._results))


def _results(program: ExportedProgram) -> list[torch.Tensor]:
    """Return the recorded results of a program."""
    recorded = []
    for node, spec in zip(results_of(program), program.graph_signature.output_specs, strict=True):
        if spec.kind is not OutputKind.USER_OUTPUT or not isinstance(node, torch.fx.Node):
            continue
        if not isinstance(spec.arg, TensorArgument):
            raise UnsupportedOpError("buckets: the model returns a size, which padding would change: return tensors")
        recorded.append(node.meta["val"])
    return recorded


def _is_symbol(size: Any) -> bool:
    return not isinstance(size, int) and bool(size.node.expr.is_Symbol)


def _mapping(given: Any, where: str, words: str) -> Mapping[Any, Any]:
    if not isinstance(given, Mapping):
        raise InputError(f"{where} must map {words}, such as {{'tokens': {{1: (64, 256)}}}}, got {given!r}")
    return given


def _sorted(name: str, axis: int, sizes: Sequence[int]) -> list[int]:
    if not isinstance(sizes, Sequence) or not sizes:
        raise InputError(f"buckets: input {name} axis {axis}: sizes must be a tuple of numbers, got {sizes!r}")
    for size in sizes:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise InputError(f"buckets: input {name} axis {axis}: sizes must be positive numbers, got {size!r}")
    return sorted(sizes)


def _next(sizes: Sequence[int], size: int) -> int:
    return next((bucket for bucket in sizes if bucket >= size), size)


def _numbers(shape: Sequence[Any], known: Mapping[Any, int]) -> tuple[int, ...]:
    """Return a shape with numbers in place of symbols."""
    return tuple(size if isinstance(size, int) else int(size.node.expr.subs(known)) for size in shape)


def _padded(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if tuple(tensor.shape) == shape:
        return tensor
    padded = tensor.new_zeros(shape)
    padded[tuple(map(slice, tensor.shape))] = tensor
    return padded
