"""oneDNN's real reorders agree with ``convert`` bit for bit, padding included."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from fmtprop.layout import DataType, MemoryDesc, convert, pack, parse_tag
from tests.layout import _native

INTEGERS = ("s32", "s8", "u8")


@pytest.fixture(scope="module")
def reorder() -> Iterator[_native.Reorder]:
    engine = _native.Reorder()
    yield engine
    engine.close()


def values(rng: np.random.Generator, md: MemoryDesc) -> np.ndarray:
    if md.dtype in INTEGERS:
        info = np.iinfo(md.dtype.numpy_dtype)
        return rng.integers(max(info.min, -5000), min(info.max, 5000), md.dims, endpoint=True).astype(
            md.dtype.numpy_dtype
        )
    floats = (rng.standard_normal(md.dims) * 200).astype(np.float32)
    if md.dtype is DataType.BF16:
        return (floats.view(np.uint32) >> 16).astype(np.uint16)
    return floats.astype(md.dtype.numpy_dtype)


TAGS_OF_RANK = {ndim: [tag for tag in _native.TAGS if parse_tag(tag).ndim == ndim] for ndim in range(1, 6)}


def random_layout(rng: random.Random, dims: tuple[int, ...], dtype: str) -> MemoryDesc:
    if rng.random() < 0.85:
        return MemoryDesc(dims, dtype, tag=rng.choice(TAGS_OF_RANK[len(dims)]))
    strides, step = [0] * len(dims), 1
    for axis in rng.sample(range(len(dims)), len(dims)):
        strides[axis] = step
        step = step * dims[axis] + rng.randint(0, 3)
    return MemoryDesc(dims, dtype, strides=strides)


def test_random_reorders(reorder: _native.Reorder) -> None:
    rng, numbers, done = random.Random(5), np.random.default_rng(5), Counter[str]()
    while sum(done.values()) < 400:
        dims = tuple(rng.choice([1, 2, 3, 5, 8, 16, 17, 33]) for _ in range(rng.randint(1, 5)))
        if np.prod(dims) > 30_000:
            continue
        dtype = rng.choice(list(_native.DATA_TYPES))
        to = dtype if rng.random() < 0.5 else rng.choice(list(_native.DATA_TYPES))
        src, dst = random_layout(rng, dims, dtype), random_layout(rng, dims, to)
        buffer = pack(values(numbers, src), src)
        theirs = reorder(buffer, src, dst)
        if theirs is None:
            done["unimplemented"] += 1
            continue
        ours = convert(buffer, src, dst)
        assert ours.tobytes() == theirs.tobytes(), f"{src!r} -> {dst!r}"
        done["same type" if dtype == to else "other type"] += 1
    assert done["same type"] >= 100 and done["other type"] >= 40, done
