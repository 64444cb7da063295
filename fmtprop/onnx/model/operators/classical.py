"""Operators of ``ai.onnx.ml`` that are arithmetic. Machines and categories run on ONNX's reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from fmtprop.onnx.model.operators.attributes import calling
from fmtprop.onnx.model.operators.values import data, known


def _scaler(x: Tensor, *, offset: Sequence[float] = (), scale: Sequence[float] = ()) -> Tensor:
    y = x.to(torch.float32)
    if offset:
        y = y - known(list(offset))
    return y * known(list(scale)) if scale else y


def _normalizer(x: Tensor, *, norm: str = "MAX") -> Tensor:
    y = x.to(torch.float32)
    sizes = {
        "MAX": lambda: y.amax(-1, keepdim=True),  # signed; only ONNX's reference takes the absolute value
        "L1": lambda: y.abs().sum(-1, keepdim=True),
        "L2": lambda: y.square().sum(-1, keepdim=True).sqrt(),
    }
    size = sizes[norm]()
    return torch.where(size == 0, y, y / size)


def _array_feature_extractor(x: Tensor, indices: Tensor) -> Tensor:
    places = indices.reshape(-1)
    return x.reshape(1, -1)[:, places] if x.ndim == 1 else x.index_select(-1, places)


def _linear_regressor(
    x: Tensor,
    *,
    coefficients: Sequence[float],
    intercepts: Sequence[float] = (),
    post_transform: str = "NONE",
    targets: int = 1,
) -> Tensor:
    if post_transform != "NONE":
        raise NotImplementedError(f"post_transform {post_transform!r}")
    weights = known(list(coefficients)).reshape(targets, -1)
    bias = known(list(intercepts)) if intercepts else None
    return F.linear(x.to(torch.float32).reshape(-1, weights.shape[1]), weights, bias)


def _zip_map(
    x: Tensor, *, classlabels_int64s: Sequence[int] = (), classlabels_strings: Sequence[str] = ()
) -> list[dict[Any, float]]:
    """Return a map from class to number for each row: (n, classes)."""
    rows = data(x, "its sequence of maps").reshape(-1, x.shape[-1]).tolist()
    labels = list(classlabels_strings or classlabels_int64s)
    return [dict(zip(labels, row, strict=True)) for row in rows]


OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "Scaler": _scaler,
    "Normalizer": _normalizer,
    "Binarizer": calling(lambda x, threshold: (x > threshold).to(x.dtype), threshold=0.0),
    "ArrayFeatureExtractor": _array_feature_extractor,
    "LinearRegressor": _linear_regressor,
    "ZipMap": _zip_map,
}
