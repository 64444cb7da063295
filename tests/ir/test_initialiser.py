"""Seeded initialisers: the exact stream, the JSON form, and every refusal."""

from __future__ import annotations

import json
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fmtprop.errors import GraphError
from fmtprop.ir.initialiser import Initialiser


def test_normal_stream_is_pinned() -> None:
    """The values that graph files promise; a numpy that draws others must be noticed."""
    values = Initialiser.normal(7, 0.25, 0.5).materialise((2, 2))
    expected = ["0x1.02cfe4p+0", "-0x1.49c83cp-2", "0x1.a670fep-1", "-0x1.48df08p-1"]
    assert values.ravel().tolist() == [float.fromhex(text) for text in expected]
    assert values.shape == (2, 2) and values.dtype == np.float32 and values.flags.c_contiguous


def test_long_normal_stream_is_pinned() -> None:
    """A million draws reach every branch of the sampler, its tail included."""
    values = Initialiser.normal(3, 0.0, 1.0).materialise((1_000_003,))
    assert zlib.crc32(values.tobytes()) == 0xE9FF2B1F
    assert abs(values.mean()) < 5e-3
    assert values.std() == pytest.approx(1.0, abs=5e-3)


def test_uniform_stream_is_pinned() -> None:
    values = Initialiser.uniform(7, 0.5, 1.5).materialise((4,))
    assert values.tolist() == [1.4449049234390259, 1.1250953674316406, 1.1841799020767212, 1.3972136974334717]


def test_seeds_and_kinds_draw_different_values() -> None:
    first = Initialiser.normal(1, 0.0, 1.0).materialise((100,))
    assert not np.array_equal(first, Initialiser.normal(2, 0.0, 1.0).materialise((100,)))
    low, high = 0.7, 1.4
    values = Initialiser.uniform(1, low, high).materialise((10_000,))
    assert low <= values.min() < low + 0.01
    assert high - 0.01 < values.max() <= high


def test_materialise_gives_a_fresh_array() -> None:
    initialiser = Initialiser.constant(1.0)
    initialiser.materialise((3,))[:] = 5.0
    assert initialiser.materialise((3,)).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.int32, np.uint8, np.bool_])
def test_constant_takes_numeric_types(dtype: type[np.generic]) -> None:
    values = Initialiser.constant(1).materialise((2, 3), dtype)
    assert values.dtype == dtype
    assert np.array_equal(values, np.ones((2, 3)))


def test_scalar_and_empty_shapes() -> None:
    assert Initialiser.normal(1, 0.0, 1.0).materialise(()).shape == ()
    assert Initialiser.uniform(1, 0.0, 1.0).materialise((0, 3)).shape == (0, 3)


finite = st.floats(-1e30, 1e30)
seeds = st.integers(0, 2**64 - 1)


@given(
    st.one_of(
        st.builds(Initialiser.normal, seeds, finite, st.floats(0, 1e30)),
        st.tuples(seeds, finite, finite).map(lambda t: Initialiser.uniform(t[0], *sorted(t[1:]))),
        st.floats(allow_nan=False, allow_infinity=False).map(Initialiser.constant),
    )
)
def test_json_round_trip_is_exact(initialiser: Initialiser) -> None:
    again = Initialiser.from_json(json.loads(json.dumps(initialiser.to_json())))
    assert again == initialiser
    assert hash(again) == hash(initialiser)
    if initialiser.kind != "constant":
        assert np.isfinite(initialiser.materialise((16,))).all()


def test_json_form() -> None:
    assert Initialiser.normal(5, 0, 1).to_json() == {"kind": "normal", "seed": 5, "mean": 0.0, "std": 1.0}
    assert Initialiser.constant(0).to_json() == {"kind": "constant", "value": 0.0}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([1], "initialiser: expected a JSON object, got list"),
        ({}, "initialiser: key 'kind' is missing; known kinds: normal, uniform, constant"),
        ({"kind": "zipf"}, "initialiser: unknown kind 'zipf'; known kinds: normal, uniform, constant"),
        ({"kind": ["normal"]}, "initialiser: unknown kind ['normal']; known kinds: normal, uniform, constant"),
        ({"kind": "normal", "mean": 0}, "initialiser normal: missing keys: seed, std"),
        ({"kind": "constant", "value": 1, "seed": 0}, "initialiser constant: unknown keys: seed"),
        ({"kind": "normal", "seed": 1, "mean": "0", "std": 1}, "initialiser normal: mean is '0', must be a number"),
        ({"kind": "constant", "value": True}, "initialiser constant: value is True, must be a number"),
        ({"kind": "constant", "value": float("nan")}, "initialiser constant: value is nan, must be finite"),
        ({"kind": "constant", "value": 10**400}, "must be finite"),
        ({"kind": "normal", "seed": 1, "mean": 0, "std": -1}, "initialiser normal: std is -1.0, must not be negative"),
        (
            {"kind": "uniform", "seed": 1, "low": 2, "high": 1},
            "initialiser uniform: low is 2.0 and high is 1.0, low must not exceed high",
        ),
        ({"kind": "normal", "seed": -1, "mean": 0, "std": 1}, "initialiser normal: seed is -1, must be in [0, 2**64)"),
        ({"kind": "normal", "seed": 1.5, "mean": 0, "std": 1}, "initialiser normal: seed is 1.5, must be an integer"),
        (
            {"kind": "normal", "seed": 1, "mean": 0, "std": 1e38},
            "initialiser normal: parameters (0.0, 1e+38) exceed 1e+30, float32 would overflow",
        ),
    ],
)
def test_from_json_refuses(data: object, message: str) -> None:
    with pytest.raises(GraphError) as caught:
        Initialiser.from_json(data)
    assert message in str(caught.value)


def test_constructor_refuses_wrong_number_of_parameters() -> None:
    with pytest.raises(GraphError, match="initialiser normal: got 1 parameters, expected mean, std"):
        Initialiser("normal", 1, (0.0,))


def test_constructor_refuses_a_seed_on_a_constant() -> None:
    with pytest.raises(GraphError, match="initialiser constant: seed is 4, must be 0 because nothing is drawn"):
        Initialiser("constant", 4, (0.0,))


@pytest.mark.parametrize(
    ("initialiser", "shape", "dtype", "message"),
    [
        (Initialiser.constant(1), (2, -1), np.float32, "shape (2, -1) has a negative dimension"),
        (Initialiser.normal(1, 0, 1), (2,), np.float64, "data type float64 is not supported"),
        (Initialiser.constant(0.5), (2,), np.int64, "value 0.5 does not fit data type int64"),
        (Initialiser.constant(300), (2,), np.uint8, "value 300.0 does not fit data type uint8"),
        (Initialiser.constant(2**63), (2,), np.int64, "does not fit data type int64"),
        (Initialiser.constant(2), (2,), np.bool_, "value 2.0 does not fit data type bool, use 0 or 1"),
        (Initialiser.constant(1e300), (2,), np.float32, "value 1e+300 overflows data type float32"),
        (Initialiser.constant(1), (2,), np.str_, "is not numeric"),
    ],
)
def test_materialise_refuses(initialiser: Initialiser, shape: tuple[int, ...], dtype: type, message: str) -> None:
    with pytest.raises(GraphError) as caught:
        initialiser.materialise(shape, dtype)
    assert message in str(caught.value)
