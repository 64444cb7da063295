"""Damaged models: each is imported or ends in one ImportModelError, within 10 s and 1 GB.

``python -m tests.onnx.fuzz 0:500`` tries the models of ONNX's own suite, one for each seed, with one to four
changes: of bytes, or of fields of the protobuf messages. From seed 1 000 000 on, edges, nodes, attributes and functions
are exchanged within a model and with others. It prints what breaks the rule.
"""

from __future__ import annotations

import random
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

from fmtprop.errors import ImportModelError
from fmtprop.onnx.model import from_onnx

MOST_SECONDS = 10
MOST_MEGABYTES = 1000
NUMBERS = [0, 1, -1, 2, 7, 64, 255, 65536, 2**31 - 1, -(2**31), 2**40, 2**62, -(2**63)]
WORDS = [
    "",
    "x",
    "y",
    "Relu",
    "Loop",
    "Identity",
    "ai.onnx.ml",
    "com.microsoft",
    "../../etc/passwd",
    "\0",
    "a" * 9000,
    "é",
]


@cache
def models() -> list[bytes]:
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        cases = load_model_tests(kind="node")
    return [case.model.SerializeToString() for case in cases if case.model is not None]


def messages(message: Any) -> Iterator[Any]:
    yield message
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in value if hasattr(value, "append") or hasattr(value, "add") else [value]:
                yield from messages(inner)


def change_field(model: onnx.ModelProto, draw: random.Random) -> None:
    """Set, repeat, remove or exchange one field of one message."""
    message = draw.choice(list(messages(model)))
    field = draw.choice(message.DESCRIPTOR.fields)
    value = getattr(message, field.name)
    repeated = hasattr(value, "append") or hasattr(value, "add")
    if draw.random() < 0.2 or field.type == FieldDescriptor.TYPE_MESSAGE:
        if repeated and len(value) > 1 and draw.random() < 0.7:
            one = draw.randrange(len(value))
            if draw.random() < 0.5 or field.type != FieldDescriptor.TYPE_MESSAGE:
                del value[one]
            else:
                value.add().CopyFrom(value[one])
        else:
            message.ClearField(field.name)
        return
    kind = field.cpp_type
    new: Any = draw.choice(NUMBERS)
    if kind == FieldDescriptor.CPPTYPE_STRING:
        new = draw.choice(WORDS)
        new = new.encode() if field.type == FieldDescriptor.TYPE_BYTES else new
    elif kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        new = draw.choice([0.0, -1.0, 1e30, float("nan"), float("inf")])
    try:
        if repeated:
            value.append(new)
        else:
            setattr(message, field.name, new)
    except (ValueError, TypeError):  # a number that the field cannot hold
        pass


def change_bytes(data: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(data) + 1)
    some = bytes(draw.randrange(256) for _ in range(draw.randrange(1, 6)))
    return data[:place] + some + data[place + draw.choice([0, len(some), draw.randrange(20)]) :]


def change_graph(model: onnx.ModelProto, draw: random.Random) -> None:
    """Change how the nodes of a model belong together, so that each message alone stays well-formed."""
    graph, other = model.graph, onnx.ModelProto.FromString(draw.choice(models())).graph
    copy = onnx.GraphProto.FromString(graph.SerializeToString())  # protobuf must not copy a message into itself
    if not graph.node:
        return
    node = draw.choice(graph.node)
    values = [*(v.name for v in graph.input), *(name for n in graph.node for name in n.output), ""]
    ways: list[Callable[[], object]] = [
        lambda: node.input and node.input.__setitem__(draw.randrange(len(node.input)), draw.choice(values)),
        lambda: node.output and node.output.__setitem__(draw.randrange(len(node.output)), draw.choice(values)),
        lambda: node.input.extend(draw.choices(values, k=draw.choice([1, 3, 200]))),
        lambda: node.output.extend(f"new{index}" for index in range(draw.choice([1, 20]))),
        lambda: graph.node.extend(other.node),
        lambda: graph.node.extend([node] * draw.choice([1, 50])),
        lambda: node.attribute.extend(a for n in other.node for a in n.attribute),
        lambda: graph.initializer.add(
            name=draw.choice(values), data_type=draw.randrange(1, 17), dims=[2, 3], raw_data=bytes(24)
        ),
        lambda: draw.choice(graph.output).type.CopyFrom(draw.choice(other.output).type),
        lambda: [info.type.CopyFrom(draw.choice(other.output).type) for info in graph.input[:1]],
        lambda: setattr(node, "op_type", draw.choice(other.node).op_type) if other.node else None,
        lambda: setattr(node, "domain", draw.choice(["com.microsoft", "ai.onnx.ml", "ai.onnx", "none"])),
        lambda: setattr(model.opset_import[0], "version", draw.randrange(1, 30)) if model.opset_import else None,
        lambda: node.attribute.add(name="body", type=onnx.AttributeProto.GRAPH).g.CopyFrom(copy),
        lambda: model.functions.add(
            name=node.op_type, domain=node.domain, input=node.input, output=node.output, node=[node]
        ),
        lambda: _shuffle(graph.node, draw),
    ]  # fmt: skip
    draw.choice(ways)()


def _shuffle(nodes: Any, draw: random.Random) -> None:
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    draw.shuffle(kept)
    del nodes[:]
    nodes.extend(kept)


#: from this seed on, graphs are changed, and not fields
GRAPHS = 1_000_000


def damaged(seed: int) -> bytes:
    draw = random.Random(seed)
    data = draw.choice(models())
    if seed >= GRAPHS:
        model = onnx.ModelProto.FromString(data)
        for _ in range(draw.randrange(1, 4)):
            change_graph(model, draw)
        return model.SerializeToString()
    for _ in range(draw.randrange(1, 5)):
        if draw.random() < 0.4:
            data = change_bytes(data, draw)
            continue
        try:
            model = onnx.ModelProto.FromString(data)
        except DecodeError:
            continue
        change_field(model, draw)
        data = model.SerializeToString()
    return data


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def check(seed: int) -> str:
    """Return how the import of a damaged model ends: ``"graph"``, ``"refused"``, or the rule that is broken."""
    data = damaged(seed)

    def load() -> str:
        from_onnx(data)
        return "graph"

    return measured(f"seed {seed}", load)


def measured(name: str, load: Callable[[], str]) -> str:
    """Return the result of an import, ``"refused"``, or the rule that is broken."""
    before, start = peak_megabytes(), time.process_time()
    try:
        end = load()
    except ImportModelError:
        end = "refused"
    except Exception as error:  # whatever it is, it is the finding
        end = f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    seconds, megabytes = time.process_time() - start, peak_megabytes() - before
    if seconds > MOST_SECONDS or megabytes > MOST_MEGABYTES:
        return f"{name}: {seconds:.1f} s, {megabytes:.0f} MB"
    return end


def main(seeds: str) -> int:
    import faulthandler

    faulthandler.enable()
    first, last = map(int, seeds.split(":"))
    ends = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(first, last):
            print(f"\r{seed}", end="", file=sys.stderr, flush=True)  # the seed of a crash
            ends.append(check(seed))
    found = [end for end in ends if end not in ("graph", "refused")]
    print(*found, sep="\n")
    print(f"{len(ends)} models: {ends.count('graph')} imported, {ends.count('refused')} refused, {len(found)} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
