"""What plans of a model for several shapes share: packed weights, memory of activations, and choices of formats."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import torch

from fmtprop.compiling.compilation import Compilation
from fmtprop.compiling.entrants import Entrant, entrant_of
from fmtprop.ir.graph import Graph
from fmtprop.runtime.arenas import GROWTH, Arenas
from fmtprop.runtime.weights import SharedForms

#: the choices of a plan serve shapes whose inputs have up to this factor more or fewer elements: other choices may pack
#: all weights once more. With those for 128 tokens, BERT takes 1.00 times as long for 31 and 24 tokens as with
#: their own, 1.08 for 16, 1.14 for 8
_SIMILAR = 8.0

#: plans whose choices are kept; the oldest goes first
_MOST = 8


class Shapes:
    """The packed weights, the memory and the choices of a model's plans."""

    def __init__(self, tensors: Iterable[object]) -> None:
        self.forms = SharedForms(tensor for tensor in tensors if isinstance(tensor, torch.Tensor))
        self.arenas = Arenas(growth=GROWTH)
        #: likenesses of the primitives that passed their check
        self.alike: set[object] = set()
        #: answers of the target about fusions
        self.fused: dict[object, bool] = {}
        self._idle: dict[object, frozenset[str]] = {}
        #: sizes of the inputs, and the plan, of shapes with choices of their own
        self._chosen: list[tuple[tuple[int, ...], Entrant]] = []

    def nearest(self, imported: Graph) -> tuple[Entrant | None, bool]:
        """Return the plan of the most similar shape, if there is any, and whether that shape is similar enough."""
        sizes = _sizes(imported)
        known = [(_distance(sizes, others), plan) for others, plan in self._chosen]
        distance, plan = min(known, key=lambda one: one[0], default=(inf, None))
        return plan, distance <= _SIMILAR

    def idle(self, imported: Graph) -> frozenset[str]:
        """Return the passes that changed nothing in a graph of the same nodes and types, with other sizes."""
        return self._idle.get(_structure(imported), frozenset())

    def note(self, compilation: Compilation, *, is_first: bool = False) -> None:
        """Take note of a finished compilation; the first one has the choices of no other shape."""
        if compilation.idle:
            self._idle.setdefault(_structure(compilation.imported), compilation.idle)
        sizes = _sizes(compilation.imported)
        if compilation.is_like_another_shape and not is_first:  # those of another process have no implementations here
            self._chosen = [
                (of, compilation.kept if plan.is_checked and of == sizes else plan) for of, plan in self._chosen
            ]
        else:
            self._chosen = [*self._chosen, (sizes, compilation.kept)][-_MOST:]

    def note_choices(self, formatted: Graph, rewrite: str, *, is_checked: bool = False) -> Entrant:
        """Take note of the choices of another process: a formatted graph, and the name of the rewrite before it.

        `is_checked`: whether its primitives passed their check there, on a machine like this one.
        """
        entrant = entrant_of(formatted, rewrite, is_checked=is_checked)
        self._chosen.append((_sizes(formatted), entrant))
        return entrant


def _structure(imported: Graph) -> object:
    return tuple((name, node.op, *(type_.dtype for type_ in node.results)) for name, node in imported.entries())


def _sizes(imported: Graph) -> tuple[int, ...]:
    return tuple(max(node.results[0].size, 1) for node in imported.input_nodes)


def _distance(sizes: tuple[int, ...], others: tuple[int, ...]) -> float:
    """Return how many times as many elements an input has, or how many times fewer."""
    if len(sizes) != len(others):
        return inf
    return max((max(one / other, other / one) for one, other in zip(sizes, others, strict=True)), default=1.0)
