"""The XLA dialect agrees with XLA itself, as jax carries it (optional: needs jax)."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest

from fmtprop.dialects.xla import IndexUtil, Layout, Shape, make_shape, parse_shape

jax = pytest.importorskip("jax", reason="jax is not installed")
xla_client = pytest.importorskip("jax._src.lib", reason="jax without its XLA client").xla_client
jax_layout = pytest.importorskip("jax.experimental.layout", reason="jax without layouts")

DIMS = [(), (5,), (2, 3), (4, 1, 3), (2, 3, 4, 5)]
TYPES = {"f32": "float32", "f16": "float16", "f64": "float64", "s32": "int32", "s8": "int8", "u8": "uint8"}
TYPES |= {"s64": "int64", "s16": "int16", "u64": "uint64", "u32": "uint32", "u16": "uint16", "pred": "bool"}


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("name", TYPES)
def test_text_form_is_xlas(name: str, dims: tuple[int, ...]) -> None:
    for order in itertools.permutations(range(len(dims))):
        theirs = xla_client.Shape.array_shape(np.dtype(TYPES[name]), dims, order)
        ours = Shape(name, dims, Layout(order))
        assert str(ours) == str(theirs)
        assert parse_shape(str(theirs)) == ours
        assert (theirs.rank(), theirs.dimensions()) == (ours.rank, ours.dimensions)
        assert theirs.layout().minor_to_major() == ours.layout.minor_to_major


def test_default_layout_is_xlas() -> None:
    theirs = xla_client.Shape.array_shape(np.dtype("float32"), (2, 3, 4)).with_major_to_minor_layout_if_absent()
    assert str(make_shape("f32", (2, 3, 4))) == str(theirs)


@pytest.mark.parametrize("dims", DIMS[1:])
def test_memory_image_is_what_xla_stores(dims: tuple[int, ...]) -> None:
    array = np.arange(np.prod(dims), dtype=np.float32).reshape(dims)
    device = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    for order in itertools.permutations(range(len(dims))):
        wanted = jax_layout.Format(jax_layout.Layout(tuple(reversed(order))), device)
        stored = jax.device_put(array, wanted)
        stored.block_until_ready()
        raw = (ctypes.c_float * array.size).from_address(stored.unsafe_buffer_pointer())
        image = np.ctypeslib.as_array(raw).copy()
        shape = Shape("f32", dims, Layout(order))
        assert np.array_equal(shape.linearize(array), image), str(shape)
        for linear, value in enumerate(image.tolist()):
            assert array[IndexUtil.linear_index_to_multidimensional_index(shape, linear)] == value
