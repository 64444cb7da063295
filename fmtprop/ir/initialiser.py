"""Seeded initialisers: tensors described by a few numbers instead of their elements.

This module owns the description (:class:`Initialiser`), its JSON form and the one function that turns it into an
array. A graph file uses it to ship a network of a hundred megabytes as a few kilobytes. It must know nothing of
graphs, torch or oneDNN: bf16 and other types that numpy lacks are converted by callers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fmtprop.errors import GraphError

# Kind -> names of its parameters, in the order in which `Initialiser.parameters` stores them.
_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "normal": ("mean", "std"),
    "uniform": ("low", "high"),
    "constant": ("value",),
}
_SEED_LIMIT = 2**64
# Far beyond any weight and far enough inside float32 that scaling a draw cannot overflow.
_RANDOM_LIMIT = 1e30
# More standard deviations than any draw has: the tail of numpy's ziggurat in float32 ends at 3.7 + 24 ln 2 / 3.7 < 9.
_FARTHEST_DEVIATIONS = 16.0


@dataclass(frozen=True)
class Initialiser:
    """A reproducible description of a tensor's values.

    Equal initialisers give equal arrays: the random kinds draw float32 values from numpy's PCG64 stream of
    ``seed``, which depends on neither the machine's threads nor the version of torch.

    >>> Initialiser.constant(2.0).materialise((2, 2)).tolist()
    [[2.0, 2.0], [2.0, 2.0]]
    >>> weights = Initialiser.normal(seed=7, mean=0.0, std=0.1)
    >>> weights == Initialiser.from_json(weights.to_json())
    True
    """

    kind: str
    #: seed of the stream, 0 <= seed < 2**64. Must be 0 for ``"constant"``, which draws nothing.
    seed: int
    #: ``(mean, std)``, ``(low, high)`` or ``(value,)``, all finite, std >= 0 and low <= high; parameters of the random
    #: kinds are at most 1e30 in magnitude, so that float32 holds every draw
    parameters: tuple[float, ...]

    def __post_init__(self) -> None:
        names = _parameter_names(self.kind)
        if len(self.parameters) != len(names):
            raise GraphError(
                f"initialiser {self.kind}: got {len(self.parameters)} parameters, expected {', '.join(names)}"
            )
        # Integers are stored as floats, so that equality and the JSON text do not depend on the spelling.
        values = tuple(_finite(self.kind, name, value) for name, value in zip(names, self.parameters, strict=True))
        object.__setattr__(self, "parameters", values)
        _check_seed(self.kind, self.seed)
        if self.kind != "constant" and max(map(abs, values)) > _RANDOM_LIMIT:
            raise GraphError(
                f"initialiser {self.kind}: parameters {values} exceed {_RANDOM_LIMIT:g}, float32 would overflow"
            )
        if self.kind == "normal" and values[1] < 0:
            raise GraphError(f"initialiser normal: std is {values[1]}, must not be negative")
        if self.kind == "uniform" and values[0] > values[1]:
            raise GraphError(
                f"initialiser uniform: low is {values[0]} and high is {values[1]}, low must not exceed high"
            )

    @classmethod
    def normal(cls, seed: int, mean: float, std: float) -> Initialiser:
        """Describe normally distributed values with a mean and a standard deviation."""
        return cls("normal", seed, (mean, std))

    @classmethod
    def uniform(cls, seed: int, low: float, high: float) -> Initialiser:
        """Describe values distributed uniformly over ``[low, high)``."""
        return cls("uniform", seed, (low, high))

    @classmethod
    def constant(cls, value: float) -> Initialiser:
        """Describe a tensor of equal elements."""
        return cls("constant", 0, (value,))

    @property
    def largest(self) -> float:
        """A magnitude that no element exceeds.

        >>> Initialiser.uniform(seed=1, low=-2.0, high=1.0).largest
        2.0
        """
        if self.kind == "normal":
            mean, std = self.parameters
            return abs(mean) + _FARTHEST_DEVIATIONS * std
        return max(map(abs, self.parameters))

    def materialise(self, shape: Sequence[int], dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
        """Make the array that this initialiser describes.

        `shape`: dimensions, in elements; ``()`` for a scalar. `dtype`: float32 for the random kinds; any numeric type
        that holds the value exactly for ``"constant"`` (float types round it).

        >>> Initialiser.uniform(seed=1, low=0.5, high=1.5).materialise((3,)).dtype
        dtype('float32')
        """
        dims = tuple(int(size) for size in shape)
        if any(size < 0 for size in dims):
            raise GraphError(f"initialiser {self.kind}: shape {dims} has a negative dimension")
        target = np.dtype(dtype)
        if self.kind == "constant":
            return self._fill(dims, target)
        if target != np.float32:
            raise GraphError(
                f"initialiser {self.kind}: data type {target} is not supported, random kinds give float32; "
                "materialise as float32 and convert"
            )
        return self._draw(dims)

    def _draw(self, dims: tuple[int, ...]) -> npt.NDArray[np.float32]:
        # Scale and shift stay in float32 and in place: one rounding each, the same on every machine, and no copy
        # of a tensor that may have a hundred million elements.
        generator = np.random.Generator(np.random.PCG64(self.seed))
        first, second = self.parameters
        if self.kind == "normal":
            values = np.asarray(generator.standard_normal(dims, dtype=np.float32))
            scale, shift = np.float32(second), np.float32(first)
        else:
            values = np.asarray(generator.random(dims, dtype=np.float32))
            scale, shift = np.float32(second) - np.float32(first), np.float32(first)
        values *= scale
        if shift:
            values += shift
        return values

    def check_fits(self, dtype: npt.DTypeLike) -> None:
        """Check that a data type holds the value; draws are always float32.

        Raises GraphError if the data type cannot hold it.
        """
        if self.kind == "constant":
            self._check_value(np.dtype(dtype))

    def _check_value(self, dtype: np.dtype[Any]) -> None:
        (value,) = self.parameters
        if dtype.kind not in "fiub":
            raise GraphError(f"initialiser constant: data type {dtype} is not numeric")
        if dtype.kind in "iu":
            limits = np.iinfo(dtype)
            if not value.is_integer() or not limits.min <= value <= limits.max:
                raise GraphError(f"initialiser constant: value {value} does not fit data type {dtype}")
        if dtype.kind == "b" and value not in (0.0, 1.0):
            raise GraphError(f"initialiser constant: value {value} does not fit data type bool, use 0 or 1")
        if dtype.kind == "f" and abs(value) > float(np.finfo(dtype).max):
            raise GraphError(f"initialiser constant: value {value} overflows data type {dtype}")

    def _fill(self, dims: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        self._check_value(dtype)
        (value,) = self.parameters
        return np.full(dims, int(value) if dtype.kind in "iu" else value, dtype)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object, ``{"kind": …, "seed": …, <parameter>: …}``.

        >>> Initialiser.uniform(seed=3, low=0.0, high=1.0).to_json()
        {'kind': 'uniform', 'seed': 3, 'low': 0.0, 'high': 1.0}
        """
        seed = {} if self.kind == "constant" else {"seed": self.seed}
        return {"kind": self.kind, **seed, **dict(zip(_PARAMETERS[self.kind], self.parameters, strict=True))}

    @classmethod
    def from_json(cls, data: object) -> Initialiser:
        """Read the JSON object that :meth:`to_json` wrote."""
        if not isinstance(data, Mapping):
            raise GraphError(f"initialiser: expected a JSON object, got {type(data).__name__}")
        if "kind" not in data:
            raise GraphError(f"initialiser: key 'kind' is missing; known kinds: {', '.join(_PARAMETERS)}")
        kind = data["kind"]
        names = _parameter_names(kind)
        expected = {"kind", *names} | (set() if kind == "constant" else {"seed"})
        if missing := sorted(expected - set(data)):
            raise GraphError(f"initialiser {kind}: missing keys: {', '.join(missing)}")
        if unknown := sorted(str(key) for key in set(data) - expected):
            raise GraphError(f"initialiser {kind}: unknown keys: {', '.join(unknown)}")
        return cls(kind, data.get("seed", 0), tuple(data[name] for name in names))


def _parameter_names(kind: object) -> tuple[str, ...]:
    if not isinstance(kind, str) or kind not in _PARAMETERS:
        raise GraphError(f"initialiser: unknown kind {kind!r}; known kinds: {', '.join(_PARAMETERS)}")
    return _PARAMETERS[kind]


def _finite(kind: str, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise GraphError(f"initialiser {kind}: {name} is {value!r}, must be a number")
    try:
        number = float(value)
    except OverflowError:  # an int beyond the range of float
        number = math.inf
    if not math.isfinite(number):
        raise GraphError(f"initialiser {kind}: {name} is {value!r}, must be finite")
    return number


def _check_seed(kind: str, seed: object) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise GraphError(f"initialiser {kind}: seed is {seed!r}, must be an integer")
    if not 0 <= seed < _SEED_LIMIT:
        raise GraphError(f"initialiser {kind}: seed is {seed}, must be in [0, 2**64)")
    if kind == "constant" and seed != 0:
        raise GraphError(f"initialiser constant: seed is {seed}, must be 0 because nothing is drawn")
