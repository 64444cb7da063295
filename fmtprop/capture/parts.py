"""Calls that treat both parts of complex numbers alike: the same call of real tensors, with one more axis.

Owns the list of such calls. Must not know importers: these see an ordinary call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fmtprop.ops.host_call import Parts

#: overloads that move numbers, or add them
_ALIKE = frozenset(
    f"aten.{name}"
    for name in (
        "_unsafe_view.default", "add.Tensor", "alias.default", "cat.default", "clone.default", "copy.default",
        "expand.default", "flip.default", "neg.default", "permute.default", "reshape.default", "roll.default",
        "select.int", "select_scatter.default", "slice.Tensor", "slice_scatter.default", "split.Tensor",
        "split_with_sizes.default", "squeeze.dim", "squeeze.dims", "stack.default", "sub.Tensor",
        "transpose.int", "unbind.int", "unsqueeze.default", "view.default",
    )
)  # fmt: skip

#: arguments with a size for each axis, and those with axes: from the end, these are one more away
_SIZES, _AXES = ("size", "shape"), ("dim", "dim0", "dim1", "dims")


def call_of_parts(target: str, args: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of the call of parts; None if it is not the same call."""
    tensors = [name for name in ("self", "other", "src", "tensors") if name in args]
    flat = [one for name in tensors for one in (args[name] if isinstance(args[name], list) else [args[name]])]
    if target not in _ALIKE or not all(isinstance(one, Parts) for one in flat):
        return None
    if isinstance(args.get("alpha"), complex) or (target == "aten.roll.default" and not args["dims"]):
        return None
    made = {key: _real(value) for key, value in args.items()}
    made |= {key: [*args[key], 2] for key in _SIZES if key in args}
    made |= {key: _moved(args[key]) for key in _AXES if key in args}
    if target == "aten.permute.default":
        made["dims"].append(len(made["dims"]))
    return made


def _real(value: Any) -> Any:
    if isinstance(value, list):
        return [_real(one) for one in value]
    return value.value if isinstance(value, Parts) else value


def _moved(axes: Any) -> Any:
    if isinstance(axes, list):
        return [_moved(axis) for axis in axes]
    return axes - 1 if axes < 0 else axes
