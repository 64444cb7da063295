"""Caches that grow by concatenation, without a copy of their earlier entries.

Owns the memory of such caches. Only the longest cache in a memory is grown in place, so two continuations of one cache
never meet.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import fx

from fmtprop.capture.fx_import import copied, results_of

_ATEN = torch.ops.aten

#: name of a tensor's attribute with its memory
_MEMORY = "_fmtprop_memory"

#: room behind a cache when it is moved to new memory, in elements of its axis: a fixed number, and a share of them
ROOM, ROOM_SHARE = 256, 0.5


class _Memory:
    """Memory with room behind a cache."""

    def __init__(self, cache: torch.Tensor, axis: int) -> None:
        dims, self._axis = list(cache.shape), axis
        self._length = dims[axis]
        dims[axis] += ROOM + int(ROOM_SHARE * dims[axis])
        self._whole = cache.new_empty(dims)
        self._whole.narrow(axis, 0, self._length).copy_(cache)
        self._lock = threading.Lock()

    def grown(self, cache: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor | None:
        """Return a cache with new elements behind it; None if it is not the longest here, or if there is no room.

        The cache None is the longest one.
        """
        whole, axis, count = self._whole, self._axis, new.shape[self._axis]
        if whole.is_inference() is not torch.is_inference_mode_enabled():
            return None
        with self._lock:
            start = self._length
            if start + count > whole.shape[axis] or not (cache is None or self._is_all(cache)):
                return None
            self._length += count
        whole.narrow(axis, start, count).copy_(new)
        dims = list(whole.shape)
        dims[axis] = start + count
        # no view by PyTorch's account: it would guard the sizes of a view
        result = new.new_empty(0).set_(whole.untyped_storage(), 0, dims, whole.stride())
        setattr(result, _MEMORY, self)
        return result

    def _is_all(self, cache: torch.Tensor) -> bool:
        sizes = (n for axis, n in enumerate(self._whole.shape) if axis != self._axis)
        others = (n for axis, n in enumerate(cache.shape) if axis != self._axis)
        return (
            cache.shape[self._axis] == self._length
            and cache.data_ptr() == self._whole.data_ptr()
            and cache.stride() == self._whole.stride()
            and list(sizes) == list(others)
        )


class Grow:
    """Joins a cache and new elements behind it.

    `axis`: the axis, from 0.
    """

    __name__ = "grow"

    def __init__(self, axis: int) -> None:
        self._axis = axis

    def __call__(self, cache: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Return a view of memory with room behind it."""
        if not _are_joinable(cache, new, self._axis):
            return torch.cat([cache, new], self._axis)
        memory = getattr(cache, _MEMORY, None)
        grown = memory.grown(cache, new) if isinstance(memory, _Memory) else None
        if grown is None:
            grown = _Memory(cache, self._axis).grown(None, new)
        return torch.cat([cache, new], self._axis) if grown is None else grown


def _are_joinable(cache: torch.Tensor, new: torch.Tensor, axis: int) -> bool:
    alike = cache.dtype is new.dtype and cache.ndim == new.ndim and cache.device == new.device
    return alike and all(a == b for i, (a, b) in enumerate(zip(cache.shape, new.shape, strict=True)) if i != axis)


def growing(module: fx.GraphModule) -> fx.GraphModule:
    """Return the graph with concats that grow an input, and are results, in place."""
    module = fx.GraphModule(module, copied(module.graph))
    results = results_of(module)
    for node in list(module.graph.nodes):
        if node.target is _ATEN.cat.default and node in results and _grows_an_input(node):
            axis = (node.args[1] if len(node.args) > 1 else 0) % node.meta["val"].ndim
            with module.graph.inserting_before(node):
                made = module.graph.call_function(Grow(axis), tuple(node.args[0]))
            made.meta = node.meta
            node.replace_all_uses_with(made)
            module.graph.erase_node(node)
        elif node.target is _ATEN.view.default:
            node.target = _ATEN.reshape.default  # a grown cache has gaps
    module.recompile()
    return module


def _grows_an_input(concat: fx.Node) -> bool:
    joined: Any = concat.args[0]
    sizes = concat.meta["val"].shape
    return len(joined) == 2 and joined[0].op == "placeholder" and any(isinstance(n, torch.SymInt) for n in sizes)
