from __future__ import annotations

import json
import re
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest

from fmtprop.errors import GraphError, ImportModelError, InputError
from fmtprop.ir.structure import Slot, describe, flatten_arguments, restructure

Point = namedtuple("Point", "row column")


@dataclass
class Detection:
    boxes: object
    label: str = "cat"


RESULTS = [
    (Slot(0), "a"),
    ((Slot(0),), ("a",)),
    ([Slot(1), [Slot(0)]], ["b", ["a"]]),
    ({"y": Slot(0), 3: (None, 2.5, True)}, {"y": "a", 3: (None, 2.5, True)}),
    (OrderedDict(y=Slot(1)), {"y": "b"}),
    (Point(Slot(1), Slot(0)), Point("b", "a")),
    ((Slot(0), Slot(0)), ("a", "a")),
    (None, None),
    (Detection(Slot(0)), {"boxes": "a", "label": "cat"}),  # not registered: becomes a dict
]


@pytest.mark.parametrize(("tree", "expected"), RESULTS)
def test_results_are_put_back(tree, expected):
    assert restructure(describe([], [], tree), ["a", "b"]) == expected


def test_named_tuples_keep_their_fields():
    result = restructure(describe([], [], Point(Slot(0), Slot(1))), ["a", "b"])
    assert result.row == "a" and result._fields == ("row", "column")


@pytest.mark.parametrize("key", [b"a", (1, 2), frozenset(), int])
def test_keys_that_json_lacks_are_named(key):
    with pytest.raises(ImportModelError, match=rf"has the key {re.escape(repr(key))} \(.*use text or numbers"):
        describe([("x", {"ok": 1, "inner": OrderedDict({key: Slot(0)})})], [], None)


def test_registered_dataclass_is_rebuilt():
    torch = pytest.importorskip("torch")

    @dataclass
    class Registered:
        score: object

    torch.export.register_dataclass(Registered, serialized_type_name=f"{__name__}.{Registered.__qualname__}")
    result = restructure(describe([], [], Registered(Slot(0))), ["a"])
    assert isinstance(result, Registered) and result.score == "a"


def test_no_description_means_one_output_or_a_tuple():
    assert restructure("", ["a"]) == "a"
    assert restructure("", ["a", "b"]) == ("a", "b")
    assert flatten_arguments("", ("a", "b"), {}) == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "keys positional, keyword, results"),
        ('{"positional":[],"keyword":[],"results":7}', "expected an object with one of the keys"),
        ('{"positional":[],"keyword":[],"results":{"slot":9}}', "output 9 does not exist, the graph has 1"),
        ('{"positional":[],"keyword":[],"results":{"slot":-1}}', "output -1 does not exist"),
        ('{"positional":[],"keyword":[],"results":{"dict":[1]}}', "malformed"),
        ('{"positional":[],"keyword":[],"results":{"object":"a.b"}}', "malformed"),
        ('{"positional":[],"keyword":[],"results":{"namedtuple":"P","items":[["a b",{"value":1}]]}}', "malformed"),
    ],
)
def test_malformed_descriptions_are_refused(text, message):
    with pytest.raises(GraphError, match=message):
        restructure(text, ["a"])


def test_a_name_in_a_file_never_makes_a_class_run():
    results = {"object": "subprocess.Popen", "items": [["args", {"value": "true"}]]}
    text = json.dumps({"positional": [], "keyword": [], "results": results})
    assert restructure(text, []) == {"args": "true"}


# forward(x, masks, scale=2.0, *, mode="fast"), called with two tensors in masks
CALL = describe(
    [("x", Slot(0)), ("masks", {"a": Slot(1), "b": [Slot(2), 7]}), ("scale", 2.0)],
    [("mode", "fast"), ("extra", Slot(3))],
    Slot(0),
)
MASKS = {"a": "A", "b": ["B", 7]}


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (("X", MASKS), {"extra": "E"}),
        (("X",), {"masks": MASKS, "extra": "E"}),
        ((), {"extra": "E", "masks": {"b": ("B", 7), "a": "A"}, "x": "X"}),
        (("X", MASKS, 2.0), {"extra": "E", "mode": "fast"}),
        (("X", MASKS, 2), {"extra": "E"}),
    ],
)
def test_arguments_are_taken_apart(args, kwargs):
    assert flatten_arguments(CALL, args, kwargs) == ["X", "A", "B", "E"]


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (("X",), {"extra": "E"}, "argument 'masks' is missing; the model was imported with x, masks, scale"),
        (("X", MASKS, 2.0, "fast"), {"extra": "E"}, "got 4 positional arguments; the model was imported with 3"),
        (("X", MASKS), {"extra": "E", "x": "X"}, "'x' is given twice"),
        (("X", MASKS), {"extra": "E", "speed": 1}, "unknown argument 'speed'"),
        (("X", MASKS, 3.0), {"extra": "E"}, "scale: got 3.0, but the model was imported with 2.0"),
        (("X", MASKS, True), {"extra": "E"}, "scale: got True"),
        (("X", {"a": "A"}), {"extra": "E"}, "masks: expected the keys 'a', 'b', got a dict with keys 'a'"),
        (("X", {"a": "A", "b": ["B"]}), {"extra": "E"}, r"masks\['b'\]: expected 2 items in a list, got a list of 1"),
        (("X", {"a": "A", "b": ["B", 8]}), {"extra": "E"}, r"masks\['b'\]\[1\]: got 8, but .* with 7"),
        (("X", MASKS), {"extra": "E", "mode": "slow"}, "mode: got 'slow'"),
    ],
)
def test_wrong_arguments_are_named(args, kwargs, message):
    with pytest.raises(InputError, match=message):
        flatten_arguments(CALL, args, kwargs)


def test_values_that_json_lacks_are_compared_by_their_text():
    text = describe([("x", Slot(0)), ("kind", Point)], [], Slot(0))
    assert flatten_arguments(text, ("X", Point), {}) == ["X"]
    with pytest.raises(InputError, match="kind: got a type"):
        flatten_arguments(text, ("X", Detection), {})


def test_without_description_keywords_are_refused():
    with pytest.raises(InputError, match="takes its inputs by position; got keyword 'mask'"):
        flatten_arguments("", ("a",), {"mask": 1})
