from __future__ import annotations

import json
import re
from collections import OrderedDict, namedtuple
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from fmtprop.errors import GraphError, ImportModelError, InputError
from fmtprop.ir import structure
from fmtprop.ir.structure import Slot, describe, flatten_arguments, restructure
from fmtprop.ir.structure_check import check_structure

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
    (OrderedDict(y=Slot(1)), OrderedDict(y="b")),
    (OrderedDict({3: Slot(1)}), {3: "b"}),
    (Point(Slot(1), Slot(0)), Point("b", "a")),
    ((Slot(0), Slot(0)), ("a", "a")),
    (None, None),
    (Detection(Slot(0)), {"boxes": "a", "label": "cat"}),  # not registered: becomes a dict
]


@pytest.mark.parametrize(("tree", "expected"), RESULTS)
def test_results_are_put_back(tree, expected):
    found = restructure(describe([], [], tree), ["a", "b"])
    assert found == expected and type(found) is type(expected)


def test_results_of_pytorchs_functions_have_their_class():
    tree = torch.ones(3).topk(2)
    text = describe([], [], type(tree)((Slot(1), Slot(0))))
    structure._NAMED_TUPLES.clear()  # as in another process
    found = restructure(text, ["a", "b"])
    assert type(found) is torch.return_types.topk and (found.values, found.indices) == ("b", "a")


def test_named_tuples_keep_their_fields():
    result = restructure(describe([], [], Point(Slot(0), Slot(1))), ["a", "b"])
    assert result.row == "a" and result._fields == ("row", "column")


class Place(NamedTuple):
    """A class with a method, for instance a detector's results."""

    row: object
    column: object

    def swapped(self) -> Place:
        return Place(self.column, self.row)


class Checked(Place):
    def __new__(cls, both: Sequence[object]) -> Checked:
        return super().__new__(cls, *both)


def test_named_tuples_keep_their_class():
    text = describe([], [], [Place(Slot(0), Slot(1)), Checked((Slot(1), 3))])
    one, other = restructure(text, ["a", "b"])
    assert type(one) is Place and one.swapped() == ("b", "a")
    assert type(other) is Checked and other == ("b", 3)


def test_named_tuples_of_unknown_classes_have_the_same_name_and_fields():
    def text() -> str:  # the class ends with the function
        return describe([], [], namedtuple("Local", "row column")(Slot(0), Slot(1)))

    known = describe([], [], Place(Slot(0), Slot(1)))
    for one in (text(), known.replace("Place", "Local"), known.replace("column", "col")):
        found = restructure(one, ["a", "b"])
        assert type(found) is not Place and type(found).__name__ in ("Local", "Place") and found == ("a", "b")


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


def test_named_tuples_of_all_calls_are_of_one_class():
    text = describe([], [], Point(Slot(0), Slot(1)))
    first, second = restructure(text, ["a", "b"]), restructure(text, ["c", "d"])
    assert first == Point("a", "b") and type(first) is type(second)


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


# ---------------------------------------------------------------- the check of what comes from outside

WHOLE = describe(
    [("x", Slot(0)), ("masks", {"a": Slot(2), 3: [Slot(1), 7]}), ("scale", 2.0), ("kind", Point)],
    [("mode", Detection(Slot(3)))],
    [Slot(0), {"y": (Slot(1), None)}, Point(Slot(0), "a"), Detection(True)],
)
JUNK = [None, True, -1, 99, 1.5, "", "a b", "slot", [], [1], [[1, 2]], [["a", {"value": 1}]], {}, {"slot": 0}]
JUNK += [{"slot": True}, {"slot": 4}, {"value": []}, {"opaque": 1}, {"list": {}}, {"tuple": 1}, {"dict": [["a"]]}]
JUNK += [{"dict": [[[], {"value": 1}]]}, {"namedtuple": "P"}, {"namedtuple": 1, "items": []}, {"object": "a"}]
JUNK += [{"namedtuple": "P", "items": [["def", {"value": 1}]]}, {"value": 1, "slot": 0}, {"value": 1, "items": []}]


def _places(tree, path=()):
    yield path
    for key, child in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield from _places(child, (*path, key))


def _edited(path, junk):
    data = json.loads(WHOLE)
    if not path:
        return json.dumps(junk)
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = junk
    return json.dumps(data)


def test_a_description_that_passes_the_check_can_be_used():
    check_structure(WHOLE, 4, 2)
    check_structure("", 4, 2)
    refused = 0
    for text in [_edited(path, junk) for path in _places(json.loads(WHOLE)) for junk in JUNK]:
        try:
            check_structure(text, 4, 2)
        except GraphError:
            refused += 1
            continue
        restructure(text, ["a", "b"])
        with pytest.raises(InputError):
            flatten_arguments(text, ("X",), {"no such argument": 1})
    assert refused > 1000


TWICE = '{"positional":[["x",{"slot":0}],["x",{"value":1}]],"keyword":[],"results":{"value":1}}'
DEEP = '{"positional":[["x",{"slot":0}]],"keyword":[],"results":' + '{"list":[' * 200 + "]}" * 200 + "}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (describe([("x", Slot(0)), ("y", Slot(0))], [], None), "hold inputs 0, 0, the graph has 1"),
        (describe([], [], None), "the arguments hold inputs none, the graph has 1 inputs, each held once"),
        (describe([("x", [Slot(1)])], [], None), r"argument 'x'\[0\]: there is no tensor 1, the graph has 1 here"),
        (TWICE, "arguments: two of the keys 'x', 'x' are the same"),
        (DEEP, "is nested deeper than 100 levels"),
        ("[" * 100_000, "nested too deeply"),
        ("9" * 10_000, "not JSON"),
    ],
)
def test_what_is_wrong_with_a_description_is_named(text, message):
    with pytest.raises(GraphError, match=f"graph structure: .*{message}"):
        check_structure(text, 1, 1)


def test_nan_is_the_nan_that_a_model_was_imported_with():
    text = describe([("x", Slot(0)), ("fill", float("nan"))], [], Slot(0))
    assert flatten_arguments(text, ("x", float("nan")), {}) == ["x"]
    with pytest.raises(InputError, match=r"fill: got 1\.0, but the model was imported with nan"):
        flatten_arguments(text, ("x", 1.0), {})
