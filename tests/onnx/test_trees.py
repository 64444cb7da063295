"""Ensembles of trees: as ONNX's reference computes them, in plans, and refusals of trees that are none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from fmtprop import onnx as fo
from fmtprop.errors import FmtpropError

#: that of NaN with NEQ is true, as in ONNX Runtime; the reference of the older operators takes it for missing
COMPARISONS = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ")


def nodes_of(trees: int, depth: int, modes: Sequence[str], drawn: np.random.Generator) -> dict[str, list[Any]]:
    """Return lists of random trees: some end early."""
    names = ("treeids", "nodeids", "featureids", "values", "modes", "truenodeids", "falsenodeids")
    rows: list[tuple[Any, ...]] = []
    for tree in range(trees):
        nodes, level = 1, [0]
        for step in range(depth + 1):
            below = []
            for node in level:
                feature, value = int(drawn.integers(4)), float(drawn.integers(-2, 3))
                if step == depth or drawn.random() < 0.2:
                    rows.append((tree, node, 0, 0.0, "LEAF", 0, 0))
                    continue
                rows.append((tree, node, feature, value, str(drawn.choice(modes)), nodes, nodes + 1))
                below += [nodes, nodes + 1]
                nodes += 2
            level = below
    rows.sort(key=lambda row: row[:2])
    return {f"nodes_{name}": [row[i] for row in rows] for i, name in enumerate(names)}


def ensemble(
    kind: str,
    trees: int = 5,
    depth: int = 4,
    modes: Sequence[str] = COMPARISONS[:5],
    targets: int = 3,
    negative: bool = False,
    **options: Any,
) -> onnx.ModelProto:
    """Return a model of a regressor or a classifier."""
    drawn = np.random.default_rng(trees + depth + len(modes))
    fields = nodes_of(trees, depth, modes, drawn)
    tracks = [int(x) for x in drawn.integers(0, 2, len(fields["nodes_modes"]))]
    leaves = [i for i, mode in enumerate(fields["nodes_modes"]) if mode == "LEAF"]
    signs = drawn.choice([-1, 1], len(leaves)) if negative else np.ones(len(leaves))
    word = "class" if kind == "TreeEnsembleClassifier" else "target"
    given = {
        f"{word}_treeids": [fields["nodes_treeids"][i] for i in leaves],
        f"{word}_nodeids": [fields["nodes_nodeids"][i] for i in leaves],
        f"{word}_ids": [n % targets for n in range(len(leaves))],
        f"{word}_weights": [float(x) for x in signs * drawn.random(len(leaves))],
    }
    given |= {"classlabels_int64s": [7, 3, 5][:targets]} if word == "class" else {"n_targets": targets}
    fields = {**fields, **given, "nodes_missing_value_tracks_true": tracks, **options}
    results = ["label", "y"] if word == "class" else ["y"]
    node = helper.make_node(kind, ["x"], results, domain="ai.onnx.ml", **fields)
    types = [onnx.TensorProto.INT64, onnx.TensorProto.FLOAT] if word == "class" else [onnx.TensorProto.FLOAT]
    outputs = [helper.make_tensor_value_info(name, type_, None) for name, type_ in zip(results, types, strict=True)]
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 4])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(helper.make_graph([node], "trees", [x], outputs), opset_imports=opsets, ir_version=9)


def rows(count: int, *, missing: bool = True) -> np.ndarray:
    """Return rows of small whole numbers, at which comparisons differ, and of NaN."""
    drawn = np.random.default_rng(count)
    x = drawn.integers(-3, 4, (count, 4)).astype(np.float32)
    x[(drawn.random(x.shape) < 0.15) & missing] = np.nan
    return x


def check(model: onnx.ModelProto, *, missing: bool = True) -> fo.InferenceSession:
    session = fo.InferenceSession(model.SerializeToString())
    for count in (40, 1):
        x = rows(count, missing=missing)
        for got, want in zip(session.run(None, {"x": x}), ReferenceEvaluator(model).run(None, {"x": x}), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
            assert got.dtype == want.dtype
    return session


@pytest.mark.parametrize("modes", [*((mode,) for mode in COMPARISONS), COMPARISONS], ids=str)
def test_each_comparison(modes: Sequence[str]) -> None:
    check(ensemble("TreeEnsembleRegressor", modes=modes, negative=True), missing="BRANCH_NEQ" not in modes)


@pytest.mark.parametrize("how", ["SUM", "AVERAGE", "MIN", "MAX"])
@pytest.mark.parametrize("base", [{}, {"base_values": [0.5, -1.0, 2.0]}])
def test_each_aggregate(how: str, base: dict[str, Any]) -> None:
    check(ensemble("TreeEnsembleRegressor", aggregate_function=how, negative=True, **base))


@pytest.mark.parametrize("transform", ["NONE", "SOFTMAX", "LOGISTIC"])
def test_classes(transform: str) -> None:
    check(ensemble("TreeEnsembleClassifier", post_transform=transform))


def test_trees_are_planned_and_two_classes_are_left_to_the_reference(caplog: pytest.LogCaptureFixture) -> None:
    check(ensemble("TreeEnsembleRegressor", trees=1, depth=0))
    check(ensemble("TreeEnsembleClassifier"))
    assert not caplog.records
    check(ensemble("TreeEnsembleClassifier", targets=2))
    assert "node by node" in caplog.text


@pytest.mark.parametrize(
    ("kind", "options"),
    [("TreeEnsembleClassifier", {"negative": True}), ("TreeEnsembleRegressor", {"targets": 1 << 23})],
)
def test_what_a_table_cannot_say_is_left_to_the_reference(kind: str, options: dict[str, Any]) -> None:
    """A class to which no leaf gives a number loses against negative ones, and a table of all targets has no room."""
    session = fo.InferenceSession(ensemble(kind, trees=2, **options).SerializeToString())
    session.run(None, {"x": rows(2)})
    assert session.reference_nodes


def test_deep_trees_are_left_to_the_reference() -> None:
    """A chain of 150 branches."""
    count = 150
    nodes = [*range(count), *range(count, 2 * count + 1)]
    fields = {
        "nodes_treeids": [0] * len(nodes),
        "nodes_nodeids": nodes,
        "nodes_featureids": [0] * len(nodes),
        "nodes_values": [float(n) / count for n in nodes],
        "nodes_modes": ["BRANCH_LEQ"] * count + ["LEAF"] * (count + 1),
        "nodes_truenodeids": [count + n for n in range(count)] + [0] * (count + 1),
        "nodes_falsenodeids": [*range(1, count), 2 * count] + [0] * (count + 1),
        "nodes_missing_value_tracks_true": [0] * len(nodes),
        "target_treeids": [0] * (count + 1),
        "target_nodeids": nodes[count:],
        "target_ids": [0] * (count + 1),
        "target_weights": [float(n) for n in range(count + 1)],
    }
    session = check(ensemble("TreeEnsembleRegressor", targets=1, **fields))
    assert session.reference_nodes


def test_opset_5_has_leaves_apart() -> None:
    """Two trees: x0 < 1 ? (x1 >= 0 ? 1 : 2) : 3, and a leaf of 10."""

    def tensor(values: Sequence[float], dtype: type = np.float64) -> onnx.TensorProto:
        return numpy_helper.from_array(np.array(values, dtype))

    node = helper.make_node(
        "TreeEnsemble",
        ["x"],
        ["y"],
        domain="ai.onnx.ml",
        n_targets=2,
        aggregate_function=1,
        tree_roots=[0, 2],
        nodes_featureids=[0, 1, 0],
        nodes_splits=tensor([1, 0, 0]),
        nodes_modes=tensor([1, 2, 0], np.uint8),
        nodes_truenodeids=[1, 0, 3],
        nodes_trueleafs=[0, 1, 1],
        nodes_falsenodeids=[2, 1, 3],
        nodes_falseleafs=[1, 1, 1],
        leaf_targetids=[0, 0, 0, 1],
        leaf_weights=tensor([1, 2, 3, 10]),
    )
    x = helper.make_tensor_value_info("x", onnx.TensorProto.DOUBLE, [4, 2])
    y = helper.make_tensor_value_info("y", onnx.TensorProto.DOUBLE, [4, 2])
    opsets = [helper.make_opsetid("", 22), helper.make_opsetid("ai.onnx.ml", 5)]
    model = helper.make_model(helper.make_graph([node], "g", [x], [y]), opset_imports=opsets, ir_version=10)
    given = np.array([[0, 0], [0, -1], [1, 0], [np.nan, 0]])
    (got,) = fo.InferenceSession(model.SerializeToString()).run(None, {"x": given})
    np.testing.assert_array_equal(got, [[1, 10], [2, 10], [3, 10], [3, 10]])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"nodes_featureids": [9] * 3}, "feature 9"),
        ({"nodes_truenodeids": [0] * 3}, "back to itself"),
        ({"nodes_falsenodeids": [8] * 3}, "node 8 of tree 0"),
        ({"nodes_modes": ["BRANCH_NEAR", "LEAF", "LEAF"]}, "BRANCH_NEAR"),
        ({"target_ids": [0, 9]}, "target 9 of 3"),
        ({"target_nodeids": [1, 5]}, "node 5 of tree 0"),
    ],
)
def test_what_is_no_tree_is_refused(changed: dict[str, Any], message: str) -> None:
    fields = {
        "nodes_treeids": [0] * 3,
        "nodes_nodeids": [0, 1, 2],
        "nodes_featureids": [0] * 3,
        "nodes_values": [0.0] * 3,
        "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"],
        "nodes_truenodeids": [1, 0, 0],
        "nodes_falsenodeids": [2, 0, 0],
        "nodes_missing_value_tracks_true": [0] * 3,
        "target_treeids": [0, 0],
        "target_nodeids": [1, 2],
        "target_ids": [0, 1],
        "target_weights": [1.0, 2.0],
    }
    with pytest.raises(FmtpropError, match=message):
        fo.InferenceSession(ensemble("TreeEnsembleRegressor", **{**fields, **changed}).SerializeToString()).run(
            None, {"x": rows(2)}
        )
