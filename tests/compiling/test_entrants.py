"""The plans that may be the fastest: what tells one from another on disk."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fmtprop.compiling.entrants import Entrant
from fmtprop.ir import Attrs, Choice, Graph, Node, PostOp, TensorType
from fmtprop.layout import MemoryDesc
from fmtprop.ops import Binary, Eltwise, Sum

TYPE = TensorType((1, 16, 6, 6))
PLAIN, LAST = (MemoryDesc(TYPE.dims, tag=tag) for tag in ("abcd", "acdb"))
RELU, TANH = (PostOp("eltwise", Eltwise(alg)) for alg in ("relu", "tanh"))
CHOICE = Choice("onednn", "jit:uni", {"src_0": LAST, "src_1": LAST})


def key(stem: str = "n", reads: tuple[int, int] = (0, 1), **changes: Any) -> str:
    """Return the key of a graph whose last node, changed, reads two of: the input, two results of the node behind."""
    graph = Graph(stem)
    x = graph.input(f"{stem}_x", TYPE)
    halves = graph.add(Node(f"{stem}_halves", "aten", Attrs(), (TYPE, TYPE)), {"src": x})
    node = Node(f"{stem}_sum", "binary", Binary("add"), (TYPE,), (RELU,), (LAST,), CHOICE).with_(**changes)
    values = (x, *halves)
    (dst,) = graph.add(node, {"src_0": values[reads[0]], "src_1": values[reads[1]]})
    graph.output(dst)
    return Entrant(stem, graph).key


#: each is another graph than the first, and than each other
DIFFERENT: dict[str, dict[str, Any]] = {
    "none": {},
    "op": {"op": "sum"},
    "attributes": {"attrs": Binary("mul")},
    "no post-op": {"post_ops": ()},
    "attributes of a post-op": {"post_ops": (TANH,)},
    "op of a post-op": {"post_ops": (PostOp("sum", Sum((1.0,))),)},
    "two post-ops": {"post_ops": (RELU, TANH)},
    "their order": {"post_ops": (TANH, RELU)},
    "target": {"choice": replace(CHOICE, target="reference")},
    "implementation": {"choice": replace(CHOICE, impl="ref:any")},
    "format of the first operand": {"choice": replace(CHOICE, operands={"src_0": PLAIN, "src_1": LAST})},
    "format of the second operand": {"choice": replace(CHOICE, operands={"src_0": LAST, "src_1": PLAIN})},
    "format of the result": {"descs": (PLAIN,)},
    "operands exchanged": {"reads": (1, 0)},
    "one operand twice": {"reads": (0, 0)},
    "other result of the same node": {"reads": (0, 2)},
}


def test_keys_differ_by_everything_that_is_executed() -> None:
    keys = {name: key(**changes) for name, changes in DIFFERENT.items()}
    alike = [name for name, one in keys.items() if list(keys.values()).count(one) > 1]
    assert alike == []


@pytest.mark.parametrize(
    "same",
    [
        {"stem": "m"},
        {"origin": "layer1"},
        {"choice": replace(CHOICE, reason="the source", cost=1.0, handle=object())},
    ],
    ids=["names", "origin", "why"],
)
def test_keys_are_equal_whatever_nodes_are_called_and_why_they_were_chosen(same: dict[str, Any]) -> None:
    assert key(**same) == key()
