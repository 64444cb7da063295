"""Sequences, as lists of values, and optionals, as values or None."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from fmtprop.onnx.model.operators.attributes import calling
from fmtprop.onnx.model.operators.values import axis_of, check_places, integer, ints, known


def _place(position: Tensor | None, size: int, default: int) -> int:
    place = default if position is None else integer(position, "position")
    if not -size <= place <= size:
        raise ValueError(f"position {place} is outside a sequence of {size}")
    return place + size if place < 0 else place


def _insert(sequence: list[Any], item: Any, position: Tensor | None = None) -> list[Any]:
    place = _place(position, len(sequence), len(sequence))
    return [*sequence[:place], item, *sequence[place:]]


def _erase(sequence: list[Any], position: Tensor | None = None) -> list[Any]:
    place = _place(position, len(sequence), len(sequence) - 1)
    return [*sequence[:place], *sequence[place + 1 :]]


def _split_to_sequence(x: Tensor, split: Tensor | None = None, *, axis: int = 0, keepdims: int = 1) -> list[Tensor]:
    axis = axis_of(axis, x.ndim)
    sizes = [1] if split is None else ints(split, "split")
    if split is None or not split.ndim:
        check_places(x.shape[axis] // max(sizes[0], 1))
    if split is None:
        parts = list(torch.split(x, 1, axis))
        return parts if keepdims else [part.squeeze(axis) for part in parts]
    return list(torch.split(x, sizes if split.ndim else sizes[0], axis))


def _concat_from_sequence(sequence: list[Tensor], *, axis: int, new_axis: int = 0) -> Tensor:
    return torch.stack(sequence, axis) if new_axis else torch.cat(sequence, axis)


def _get_element(value: Any) -> Any:
    if value is None:
        raise ValueError("the optional is empty")
    return value


#: operators that only pass tensors on, of any element type
CARRYING: Final = frozenset(
    """Identity SequenceEmpty SequenceConstruct SequenceInsert SequenceErase SequenceAt SequenceLength Optional
    OptionalHasElement OptionalGetElement If Loop Scan""".split()
)

OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "SequenceEmpty": calling(lambda dtype: [], 0, dtype=1),
    "SequenceConstruct": lambda *items: list(items),
    "SequenceInsert": _insert,
    "SequenceErase": _erase,
    "SequenceAt": calling(lambda sequence, position: sequence[_place(position, len(sequence), 0)], 2),
    "SequenceLength": calling(lambda sequence: known(len(sequence))),
    "SplitToSequence": _split_to_sequence,
    "ConcatFromSequence": _concat_from_sequence,
    "Optional": lambda value=None, *, type=None: value,
    "OptionalHasElement": lambda value=None: known(value is not None),
    "OptionalGetElement": _get_element,
}
