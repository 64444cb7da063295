"""Ensembles of trees of ``ai.onnx.ml``: all trees of all rows go down one level at a time.

That they are trees was checked when the file was read. ONNX's reference goes down one tree of one row at a time, in
Python: 0.06 to 1 s for the boosted trees of a package.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from fmtprop.onnx.model.operators.attributes import passed_to
from fmtprop.onnx.model.operators.values import NotInTorchError, data, known

_COMPARISONS: Final[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "BRANCH_LEQ": torch.le,
    "BRANCH_LT": torch.lt,
    "BRANCH_GTE": torch.ge,
    "BRANCH_GT": torch.gt,
    "BRANCH_EQ": torch.eq,
    "BRANCH_NEQ": torch.ne,
}
_LEAF: Final = "LEAF"

#: names of what `TreeEnsemble` says by numbers
_MODES, _AGGREGATES = (*_COMPARISONS,), ("AVERAGE", "SUM", "MIN", "MAX")
_TRANSFORMS: Final = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")


#: levels of a tree that are written out, about six steps each, and numbers of the table of what leaves give to targets
#: (64 MB): beyond, ONNX's reference goes down one branch at a time. Trees of real forests have 5 to 40 levels
_MOST_LEVELS, _MOST_NUMBERS = 100, 1 << 24


@dataclass(frozen=True)
class _Trees:
    """Nodes of all trees. A leaf leads to itself, so trees of any depth end at the same level."""

    features: np.ndarray[Any, Any]
    values: np.ndarray[Any, Any]
    #: names of comparisons, and whether NaN takes the branch of what is true
    modes: np.ndarray[Any, Any]
    tracks: np.ndarray[Any, Any]
    #: of each node: the next one where the comparison is false, and where it is true
    children: np.ndarray[Any, Any]
    roots: np.ndarray[Any, Any]

    def leaves(self, x: Tensor) -> Tensor:
        """Return the leaf of each row and tree: (rows, trees)."""
        inner = self.modes != _LEAF
        if self.features[inner].max(initial=-1) >= x.shape[1] or self.features[inner].min(initial=0) < 0:
            raise ValueError(f"its trees read feature {self.features[inner].max()}, its operand has {x.shape[1]}")
        # positions are doubled, so that a comparison's result leads to one of a node's two children
        features, values, tracks = (known(np.repeat(a, 2)) for a in (self.features, self.values, self.tracks))
        children, place = known(2 * self.children.reshape(-1)), known(2 * self.roots).expand(len(x), -1)
        modes = {mode: known(np.repeat(self.modes == mode, 2)) for mode in dict.fromkeys(self.modes[inner])}
        for _ in range(self._levels()):
            given, limit = x.gather(1, features[place]), values[place]
            turns = [_COMPARISONS[mode](given, limit) for mode in modes]
            if len(modes) > 1:
                turns = [turn & of_mode[place] for turn, of_mode in zip(turns, modes.values(), strict=True)]
            if self.tracks.any():
                turns.append(given.isnan() & tracks[place])
            place = children[place + reduce(torch.logical_or, turns)]
        return place // 2

    def _levels(self) -> int:
        level, levels = self.roots, 0
        while (inner := level[self.modes[level] != _LEAF]).size:
            level, levels = np.unique(self.children[inner]), levels + 1
            if levels > _MOST_LEVELS:
                raise NotInTorchError(f"a tree of more than {_MOST_LEVELS} levels")
        return levels


def _listed(
    *,
    nodes_treeids: Sequence[int],
    nodes_nodeids: Sequence[int],
    nodes_featureids: Sequence[int],
    nodes_modes: Sequence[str],
    nodes_truenodeids: Sequence[int],
    nodes_falsenodeids: Sequence[int],
    nodes_values: Sequence[float] = (),
    nodes_values_as_tensor: Tensor | None = None,
    nodes_hitrates: Sequence[float] = (),
    nodes_hitrates_as_tensor: Tensor | None = None,
    nodes_missing_value_tracks_true: Sequence[int] = (),
) -> tuple[_Trees, dict[tuple[int, int], int]]:
    """Return trees from lists of nodes with numbers of their own in each tree, and each node's position."""
    places = {key: place for place, key in enumerate(zip(nodes_treeids, nodes_nodeids, strict=True))}
    modes = np.array(nodes_modes, dtype=object)
    if unknown := {*modes} - {*_COMPARISONS, _LEAF}:
        raise ValueError(f"nodes_modes has {unknown.pop()!r}")
    children = np.repeat(np.arange(len(modes))[:, None], 2, 1)
    for column, ids in enumerate((nodes_falsenodeids, nodes_truenodeids)):
        for place in np.flatnonzero(modes != _LEAF).tolist():
            children[place, column] = places[nodes_treeids[place], ids[place]]
    tracks = np.array(nodes_missing_value_tracks_true or [0] * len(modes), dtype=bool)
    roots = np.array([nodes_treeids.index(tree) for tree in sorted({*nodes_treeids})])
    values = _either(nodes_values, nodes_values_as_tensor)
    return _Trees(np.array(nodes_featureids), values, modes, tracks, children, roots), places


def _sums(leaves: Tensor, nodes: int, targets: int, given: tuple[Any, Any, Any], how: str) -> Tensor:
    """Return what the leaves of a row's trees give to each target, all together: (rows, targets).

    `given`: nodes, targets and numbers.
    """
    places, ids, weights = (np.asarray(each) for each in given)
    if ids.size and not 0 <= ids.min() <= ids.max() < targets:
        raise ValueError(f"its leaves give to target {ids.max()} of {targets}")
    if nodes * targets > _MOST_NUMBERS:
        raise NotInTorchError(f"{nodes} nodes for {targets} targets")
    limits = np.finfo(weights.dtype)
    empty, join = {"MIN": (limits.max, np.minimum), "MAX": (limits.min, np.maximum)}.get(how, (0, np.add))
    table = np.full((nodes, targets), empty, weights.dtype)
    join.at(table, (places, ids), weights)
    numbers = known(table)[leaves]
    if how in ("SUM", "AVERAGE"):
        return numbers.sum(1) if how == "SUM" else numbers.mean(1)
    return numbers.amin(1) if how == "MIN" else numbers.amax(1)


def _transformed(x: Tensor, how: str) -> Tensor:
    if how not in ("NONE", "SOFTMAX", "LOGISTIC"):
        raise NotInTorchError(f"post_transform {how}")
    return {"NONE": x, "SOFTMAX": x.softmax(-1), "LOGISTIC": x.sigmoid()}[how]


def _rows(x: Tensor) -> Tensor:
    return (x if x.is_floating_point() else x.to(torch.float32)).reshape(-1, x.shape[-1])


def _tree_ensemble(
    x: Tensor,
    *,
    nodes_splits: Tensor,
    nodes_featureids: Sequence[int],
    nodes_modes: Tensor,
    nodes_truenodeids: Sequence[int],
    nodes_falsenodeids: Sequence[int],
    nodes_trueleafs: Sequence[int],
    nodes_falseleafs: Sequence[int],
    leaf_targetids: Sequence[int],
    leaf_weights: Tensor,
    tree_roots: Sequence[int],
    nodes_missing_value_tracks_true: Sequence[int] = (),
    nodes_hitrates: Tensor | None = None,
    membership_values: Tensor | None = None,
    n_targets: int = 1,
    aggregate_function: int = 1,
    post_transform: int = 0,
) -> Tensor:
    """``TreeEnsemble`` of opset 5: leaves are apart from nodes; here they come behind them."""
    count, leaves, numbers = len(nodes_featureids), len(leaf_targetids), data(nodes_modes, "nodes_modes")
    if numbers.max(initial=0) >= len(_MODES):
        raise NotInTorchError("a comparison with a set of members")
    modes = np.array([_MODES[mode] for mode in numbers] + [_LEAF] * leaves, dtype=object)
    children = np.repeat(np.arange(count + leaves)[:, None], 2, 1)
    for column, (ids, is_leaf) in enumerate(
        ((nodes_falsenodeids, nodes_falseleafs), (nodes_truenodeids, nodes_trueleafs))
    ):
        places = np.array(ids) + count * np.array(is_leaf)
        if not 0 <= places.min(initial=0) <= places.max(initial=0) < count + leaves:
            raise ValueError(f"a branch leads to node {max(ids)}; there are {count} nodes and {leaves} leaves")
        children[:count, column] = places
    roots = np.array(tree_roots)
    if not 0 <= roots.min(initial=0) <= roots.max(initial=0) < count:
        raise ValueError(f"a tree begins at node {max(tree_roots)} of {count}")
    # a tree that is one leaf has a node whose branches both lead to it
    trees = _Trees(
        np.pad(nodes_featureids, (0, leaves)),
        np.pad(data(nodes_splits, "nodes_splits"), (0, leaves)),
        modes,
        np.pad(nodes_missing_value_tracks_true or [0] * count, (0, leaves)).astype(bool),
        children,
        roots,
    )
    rows = _rows(x)
    given = (count + np.arange(leaves), leaf_targetids, data(leaf_weights, "leaf_weights"))
    sums = _sums(trees.leaves(rows), count + leaves, n_targets, given, _AGGREGATES[aggregate_function])
    return _transformed(sums, _TRANSFORMS[post_transform])


def _regressor(
    x: Tensor,
    *,
    target_treeids: Sequence[int],
    target_nodeids: Sequence[int],
    target_ids: Sequence[int],
    target_weights: Sequence[float] = (),
    target_weights_as_tensor: Tensor | None = None,
    n_targets: int = 1,
    aggregate_function: str = "SUM",
    base_values: Sequence[float] = (),
    base_values_as_tensor: Tensor | None = None,
    post_transform: str = "NONE",
    **nodes: Any,
) -> Tensor:
    """``TreeEnsembleRegressor``; the base is added behind the aggregate, as ONNX's reference does."""
    trees, places = _listed(**nodes)
    keys = list(zip(target_treeids, target_nodeids, strict=True))
    if missing := {*keys} - {*places}:
        raise ValueError("a number is that of node {1} of tree {0}, which is missing".format(*missing.pop()))
    leaves = [places[key] for key in keys]
    given = (leaves, target_ids, _either(target_weights, target_weights_as_tensor))
    sums = _sums(trees.leaves(_rows(x)), len(trees.modes), n_targets, given, aggregate_function)
    base = _either(base_values, base_values_as_tensor)
    return _transformed(sums + known(base) if base.size else sums, post_transform)


def _classifier(
    x: Tensor,
    *,
    class_treeids: Sequence[int],
    class_nodeids: Sequence[int],
    class_ids: Sequence[int],
    class_weights: Sequence[float] = (),
    class_weights_as_tensor: Tensor | None = None,
    classlabels_int64s: Sequence[int] = (),
    classlabels_strings: Sequence[str] = (),
    base_values: Sequence[float] = (),
    base_values_as_tensor: Tensor | None = None,
    post_transform: str = "NONE",
    **nodes: Any,
) -> tuple[Tensor, Tensor]:
    """``TreeEnsembleClassifier`` of three classes or more; for two, ONNX has rules of their own."""
    classes = len(classlabels_int64s)
    if classes < 3:
        raise NotInTorchError("classes with names, or less than three")
    weights = _either(class_weights, class_weights_as_tensor)
    if weights.min(initial=0) < 0 and _always_given(class_treeids, class_nodeids, class_ids, **nodes) < {
        *range(classes)
    }:
        raise NotInTorchError("a class to which no leaf may give a number, beside negative numbers")
    scores = _regressor(
        x,
        target_treeids=class_treeids,
        target_nodeids=class_nodeids,
        target_ids=class_ids,
        target_weights_as_tensor=torch.from_numpy(weights),
        n_targets=classes,
        base_values=base_values,
        base_values_as_tensor=base_values_as_tensor,
        post_transform=post_transform,
        **nodes,
    ).to(torch.float32)
    return known(list(classlabels_int64s))[scores.argmax(1)], scores


def _always_given(
    treeids: Sequence[int], nodeids: Sequence[int], classes: Sequence[int], *,
    nodes_treeids: Sequence[int], nodes_modes: Sequence[str], **_: Any,
) -> set[int]:  # fmt: skip
    """Return the classes to which every leaf of some tree gives a number.

    Only then is 0 no number of theirs: ONNX Runtime leaves a class without numbers out of the choice.
    """
    leaves = Counter(tree for tree, mode in zip(nodes_treeids, nodes_modes, strict=True) if mode == _LEAF)
    given = Counter((tree, label) for tree, _, label in {*zip(treeids, nodeids, classes, strict=True)})
    return {label for (tree, label), count in given.items() if count == leaves[tree]}


def _either(numbers: Sequence[float], tensor: Tensor | None) -> np.ndarray[Any, Any]:
    return np.array(numbers, np.float32) if tensor is None else data(tensor, "an attribute")


OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "TreeEnsemble": _tree_ensemble,
    "TreeEnsembleRegressor": passed_to(_listed)(_regressor),
    "TreeEnsembleClassifier": passed_to(_listed)(_classifier),
}
