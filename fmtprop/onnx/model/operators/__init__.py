"""The meaning of each ONNX operator, as one small PyTorch function for each of its definitions.

A function takes the operator's inputs in order and its attributes by name; ``wanted`` is the number of outputs that a
node names, ``run`` runs a subgraph. A table has the function under the operator's name; a later definition is under
the name with the first opset version of the definition (``"Softmax-13"``). The importers of :mod:`fmtprop.ops` import
the calls of a function, as those of any PyTorch program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

from fmtprop.onnx.model.operators import (
    control_flow,
    convolution,
    elementwise,
    indexing,
    matrix,
    normalization,
    quantised,
    recurrent,
    reduction,
    resampling,
    sequence,
    shape,
)
from fmtprop.onnx.model.operators.indexing import REFUSING
from fmtprop.onnx.model.operators.quantised import KEEPING
from fmtprop.onnx.model.operators.sequence import CARRYING
from fmtprop.onnx.model.operators.shape import GROWING, SHAPE_ONLY

__all__ = ["CARRYING", "GROWING", "KEEPING", "RANDOM", "REFUSING", "SAME_AS_OPSET", "SHAPE_ONLY", "find", "table"]

#: operators that draw random numbers, which a graph cannot have: it is a function of its inputs
RANDOM: Final = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)

_FAMILIES: Final = (
    control_flow, convolution, elementwise, indexing, matrix, normalization, quantised, recurrent, reduction,
    resampling, sequence, shape,
)  # fmt: skip

#: operators of ONNX Runtime that equal ONNX's of this later opset version, which a model need not import
SAME_AS_OPSET: Final = {("com.microsoft", "QuantizeLinear"): 21, ("com.microsoft", "DequantizeLinear"): 21}

_Versions = dict[str, list[tuple[int, Callable[..., Any]]]]


def _by_version(tables: list[Mapping[str, Callable[..., Any]]]) -> _Versions:
    found: _Versions = {}
    for functions in tables:
        for key, function in functions.items():
            name, _, since = key.partition("-")
            found.setdefault(name, []).append((int(since or 1), function))
    return {name: sorted(versions, key=lambda pair: -pair[0]) for name, versions in found.items()}


@cache
def _of_domain(domain: str) -> _Versions:
    """Return the functions of a domain; those of others than ONNX's own are imported by models that name it."""
    if domain == "ai.onnx.ml":
        from fmtprop.onnx.model.operators import classical, trees

        return _by_version([classical.OPERATORS, trees.OPERATORS])
    if domain == "com.microsoft":
        from fmtprop.onnx.model.operators import microsoft, microsoft_attention, microsoft_quantised

        return _by_version([microsoft.OPERATORS, microsoft_attention.OPERATORS, microsoft_quantised.OPERATORS])
    return {} if domain else _by_version([family.OPERATORS for family in _FAMILIES])


_DOMAINS: Final = ("", "ai.onnx.ml", "com.microsoft")


def find(domain: str, name: str, version: int) -> Callable[..., Any] | None:
    """Return the function of an operator, or None if there is none.

    >>> find("", "Softmax", 12) is find("", "Softmax", 13)
    False
    >>> find("", "Sofa", 13)
    """
    for since, function in _of_domain(domain).get(name, []):
        if version >= since:
            return function
    return None


def table() -> dict[tuple[str, str], list[int]]:
    """Return the first opset versions of all definitions by domain and operator."""
    return {
        (domain, name): sorted(since for since, _ in versions)
        for domain in _DOMAINS
        for name, versions in _of_domain(domain).items()
    }
