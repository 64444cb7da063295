"""Compilations that no measurement would lead to: random costs make the solver pick odd but legal combinations.

Whatever the costs are, the plan must compute what the model does. So random costs, random pins, a batch in slices and
another number of threads attack everything behind the choice: candidates, realisation, placement, plans.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from unittest import mock

from fmtprop.api import CompiledModel, Options, compile_graph
from fmtprop.compiling import selection
from fmtprop.compiling.race import Race
from fmtprop.compiling.stages import normalise
from fmtprop.ir import Graph
from fmtprop.ir.node import Node
from fmtprop.ir.ports import result_names
from fmtprop.layout import MemoryDesc
from fmtprop.passes.target import Candidate
from fmtprop.passes.variants import slice_batch
from fmtprop.targets import OneDnnTarget
from fmtprop.tuning import Tuning


class RandomCosts:
    """Seconds that depend on the seed and on what is asked alone: equal questions have equal answers."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.tuning = Tuning()
        self._exists = OneDnnTarget().reorder_cost
        #: dear reorders give long stretches of one format, cheap ones a medley
        self._dear = random.Random(seed).choice([1.0, 10.0, 300.0])

    def learn(self, steps: object) -> None:
        """Learn nothing from a run: the seed alone decides."""

    def basis(self) -> None:
        """A report has costs of its own."""

    def prepare(
        self, work: Sequence[tuple[Node, Candidate]], reorders: Sequence[tuple[MemoryDesc, MemoryDesc]]
    ) -> None:
        """Nothing is measured."""

    def node(self, node: Node, candidate: Candidate) -> float:
        if candidate.target == "view":
            return 0.0  # nothing is executed
        # by content, not by name: what a node costs as several is asked once for all that are alike
        tail = [post_op.attrs for post_op in node.post_ops]
        return (
            self._draw(node.op, node.attrs, tail, candidate.impl, *candidate.operands.values(), *candidate.results)
            * 1e-4
        )

    def reorder(self, src: MemoryDesc, dst: MemoryDesc) -> float | None:
        if src == dst or self._exists(src, dst) is None:
            return None if src != dst else 0.0
        return self._draw(src, dst) * 1e-6 * self._dear

    def _draw(self, *what: object) -> float:
        return random.Random(f"{self.seed}{what}").uniform(0.01, 1.0)


@contextmanager
def odd_planner(seed: int, *, sliced: bool = False) -> Iterator[None]:
    """Let models be planned by random costs; with `sliced`, cut batches and keep a random entrant."""

    def decide(plans: Mapping[str, object], *_: object) -> Race:
        return Race((1.0,) * len(plans), 1, random.Random(seed).randrange(len(plans)), tuple(plans))

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(selection, "costs_for", lambda *_, **__: RandomCosts(seed)))
        if sliced:
            stack.enter_context(mock.patch.object(slice_batch, "last_level_cache_nbytes", lambda: 2))
            stack.enter_context(mock.patch.object(selection, "race", decide))
            stack.enter_context(mock.patch.object(selection.Store, "verdict", lambda self, key: None))
            stack.enter_context(mock.patch.object(selection.Store, "remember", lambda self, key, name: None))
        yield


def compile_odd(graph: Graph, seed: int, pin: Mapping[str, MemoryDesc] | None = None) -> CompiledModel:
    """Compile by random costs: with a sliced batch for each third seed, without checks for each second one."""
    sliced = seed % 3 == 0 and not pin
    options = Options(policy="optimal", confirm=sliced, verify="off" if seed % 2 else "on", pin=pin or {})
    with odd_planner(seed, sliced=sliced):
        return compile_graph(graph, options)


def some_pins(graph: Graph, net: CompiledModel, seed: int) -> dict[str, MemoryDesc]:
    """Return a few of a compiled model's formats as pins: any two of them go together."""
    normal = normalise(graph)[0]
    names = {node.name for node in normal.nodes()}
    found = {}
    for node in net.graph.nodes():
        if node.is_boundary or node.choice is None or node.name not in names:
            continue
        if node.post_ops != normal.node(node.name).post_ops or node.op != normal.node(node.name).op:
            continue  # a fused pair
        inputs = normal.inputs(node.name)
        if any(node.choice.operands[name].dims != normal.type_of(value).dims for name, value in inputs.items()):
            continue  # merged groups have other weights
        ports = {name: desc for name, desc in node.choice.operands.items() if name in inputs}
        ports |= dict(zip(result_names(node), node.descs, strict=True))
        found |= {f"{node.name}.{name}": desc for name, desc in ports.items() if desc.kind == "blocked"}
    rng = random.Random(seed)
    return {name: found[name] for name in rng.sample(sorted(found), min(len(found), rng.choice([1, 2, 4])))}


def lost_pins(net: CompiledModel, pins: Mapping[str, MemoryDesc]) -> list[str]:
    """Return the pins that a compiled model does not have."""
    lost = []
    for name, desc in pins.items():
        node_name, _, port = name.rpartition(".")
        node = net.graph.node(node_name) if node_name in net.graph else None
        have = None
        if node is not None and node.choice is not None:
            have = {**node.choice.operands, **dict(zip(result_names(node), node.descs, strict=True))}.get(port)
        if have != desc:
            lost.append(f"{name}: {have}, not {desc}")
    return lost
