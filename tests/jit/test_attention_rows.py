"""Attention of few queries by machine code, against f64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmtprop.jit.attention import Tensor
from fmtprop.jit.attention_rows import AttentionRowsKernel
from fmtprop.jit.kernel import takes
from fmtprop.jit.standalone import offered
from fmtprop.layout import DataType

BF16 = pytest.mark.skipif(not takes(DataType.BF16), reason="this CPU has no bf16")


def problem(heads, queries, past, keys, depth, width, masks=(), dtype=torch.float32):
    """Return tensors of [2, heads, …]; keys [.., P, D] are rows here, and columns of the op."""
    given = {"src": (queries, depth), "key": (keys, depth), "value": (keys, width)}
    given |= {"past_key": (past, depth), "past_value": (past, width)} if past else {}
    tensors = {name: torch.randn(2, heads, *rows).to(dtype) for name, rows in given.items()}
    for number, dims in enumerate(masks):
        tensors[f"mask_{number}"] = torch.randn(*dims, past + keys).to(dtype)
    return tensors


def strides(name, tensor, batch):
    """Return where a tensor is, a query of a head being the last axis of the batch."""
    steps = [0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    query = steps[-2] if name.startswith(("src", "dst", "mask")) else 0
    nbytes = tensor.element_size()
    return Tensor(tuple(step * nbytes for step in (*steps[:2], query)), tensor.stride(-2) * nbytes)


def kernel_of(tensors, scale=0.3, **how):
    batch, queries = tensors["src"].shape[:2], tensors["src"].shape[2]
    dst = torch.empty(*batch, queries, tensors["value"].shape[-1], dtype=tensors["src"].dtype)
    whole = {**tensors, "dst": dst}
    kernel = AttentionRowsKernel(
        (*batch, queries),
        tensors["src"].shape[-1],
        dst.shape[-1],
        tuple(tensors[name].shape[2] if name in tensors else 0 for name in ("past_key", "key")),
        scale,
        tuple((name, strides(name, whole[name], batch)) for name in sorted(whole)),
        DataType.from_any(dst.dtype),
        **how,
    )
    return offered(kernel), whole


def attended(tensors, scale=0.3, threads=2, **how):
    kernel, whole = kernel_of(tensors, scale, **how)
    work = kernel.work(threads)
    for name, tensor in whole.items():
        work.point[name](tensor.data_ptr())
    work.run()
    return whole["dst"]


def exact(tensors, scale=0.3):
    wide = {name: tensor.double() * tensors.get(f"{name}_scales", 1.0) for name, tensor in tensors.items()}
    keys, values = (
        torch.cat([wide[name] for name in (f"past_{kind}", kind) if name in wide], 2) for kind in ("key", "value")
    )
    scores = wide["src"] @ keys.transpose(2, 3) * scale
    for name in ("mask_0", "mask_1"):
        scores = scores + wide.get(name, 0.0)
    return scores.softmax(-1) @ values


@settings(max_examples=60)
@given(
    heads=st.integers(1, 3),
    queries=st.sampled_from([1, 2, 3, 8, 13, 64, 65]),
    past=st.integers(0, 150),
    keys=st.integers(1, 40),
    depth=st.sampled_from([16, 48, 64, 128]),
    width=st.sampled_from([16, 64, 80, 256]),
    masks=st.lists(st.sampled_from([(1, 1, 1), (2, 1, 1)]), max_size=2),
    threads=st.integers(1, 5),
)
def check(heads, queries, past, keys, depth, width, masks, threads) -> None:
    tensors = problem(heads, queries, past, keys, depth, width, masks)
    assert (attended(tensors, threads=threads) - exact(tensors)).abs().max() <= 1e-5


def test_problems_of_any_size(isa):
    check()


def test_masks_of_each_head_and_query(isa):
    tensors = problem(3, 2, 9, 12, 32, 48, [(2, 3, 2), (1, 3, 1)])
    assert (attended(tensors) - exact(tensors)).abs().max() <= 1e-5


@pytest.mark.parametrize("queries", [7, 8])
def test_threads_share_the_queries_of_a_head(isa, queries):
    tensors = problem(1, queries, 90, 12, 32, 48, [(1, 1, queries)])
    first = attended(tensors, threads=1)
    assert (first - exact(tensors)).abs().max() <= 1e-5
    for threads in (2, 3, 6, 40):
        assert torch.equal(attended(tensors, threads=threads), first)


def test_tensors_in_other_places(isa):
    tensors = problem(3, 2, 9, 12, 32, 48)
    for name in tensors:  # tokens before heads, with gaps
        whole = torch.randn(2, tensors[name].shape[2], 3, tensors[name].shape[3] + 5)
        tensors[name] = whole[..., 3:-2].transpose(1, 2)
    assert (attended(tensors) - exact(tensors)).abs().max() <= 1e-5


def test_hidden_keys_have_no_weight(isa):
    tensors = problem(1, 1, 20, 1, 32, 32, [(2, 1, 1)])
    tensors["mask_0"] = torch.zeros_like(tensors["mask_0"])
    tensors["mask_0"][..., :15], tensors["mask_0"][1] = -torch.inf, -torch.inf
    got, expected = attended(tensors), exact(tensors)
    assert (got[0] - expected[0]).abs().max() <= 1e-5 and got[1].isnan().all() and expected[1].isnan().all()


@pytest.mark.parametrize("masks", [[(2, 1, 1)], [(1, 1, 1), (2, 1, 1)]])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=BF16)])
@pytest.mark.parametrize("coded", [False, True])
def test_blocks_of_hidden_keys_are_not_read(isa, masks, dtype, coded):
    if dtype is torch.bfloat16 and isa.lanes == 8:
        pytest.skip("AVX2 has no bf16")
    tensors = problem(2, 3, 200, 70, 32, 32, masks, dtype)
    if coded:
        for name in ("past_key", "past_value"):
            tensors[name] = torch.randint(-128, 128, tensors[name].shape, dtype=torch.int8)
            tensors[f"{name}_scales"] = (torch.rand(*tensors[name].shape[:-1], 1) / 64).to(dtype)
    mask = tensors[f"mask_{len(masks) - 1}"]
    mask[0, ..., :131], mask[0, ..., 190:] = -torch.inf, -torch.inf
    mask[1, ..., 3:] = -torch.inf
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(attended(tensors), exact(tensors).to(dtype), rtol=tolerance, atol=tolerance)
    numbers = tensors["past_value_scales" if coded else "past_value"]
    numbers[0, :, :128] = torch.nan  # which no hidden key shows
    assert attended(tensors).isfinite().all()


def test_a_query_without_visible_keys_has_the_result_0(isa):
    tensors = problem(1, 2, 20, 3, 32, 32, [(2, 1, 2)])
    tensors["mask_0"][0, 0, 1] = tensors["mask_0"][1] = -torch.inf
    tensors["src"][0, 0, 1, 5] = torch.inf  # -inf or NaN for a score, which no key shows
    tensors["src"][0, 0, 0, 5] = torch.nan
    got, expected = attended(tensors, blanks=True), exact(tensors)
    assert got[0, 0, 0].isnan().all()
    assert not got[1].any()
    assert expected[1].isnan().all()


def test_nan_stays_in_its_query(isa):
    tensors = problem(2, 2, 5, 3, 32, 32)
    tensors["src"][0, 1, 0, 7] = torch.nan
    assert torch.equal(attended(tensors).isnan(), exact(tensors).isnan())


def test_large_scores(isa):
    tensors = problem(1, 1, 30, 3, 64, 64)
    tensors["src"] *= 1000
    torch.testing.assert_close(attended(tensors), exact(tensors).float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("depth", "width"), [(20, 32), (32, 41), (1024, 32)])
def test_rows_that_vectors_do_not_divide_and_long_rows_have_no_kernel(isa, depth, width):
    assert kernel_of(problem(1, 1, 9, 1, depth, width))[0] is None


@BF16
@pytest.mark.parametrize(("queries", "past", "keys"), [(1, 0, 1), (2, 33, 12), (8, 64, 64), (13, 200, 1), (1, 63, 2)])
@pytest.mark.parametrize(("depth", "width"), [(64, 48), (48, 256), (16, 16)])
def test_bf16(queries, past, keys, depth, width):
    tensors = problem(3, queries, past, keys, depth, width, [(2, 1, 1), (1, 3, queries)], torch.bfloat16)
    torch.testing.assert_close(attended(tensors), exact(tensors).bfloat16(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("coded", [("key", "value"), ("past_key", "past_value"), ("value",)])
@pytest.mark.parametrize(("queries", "past", "keys"), [(1, 1, 1), (5, 130, 67)])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=BF16)])
def test_keys_and_values_as_codes(isa, coded, queries, past, keys, dtype):
    if dtype is torch.bfloat16 and isa.lanes == 8:
        pytest.skip("AVX2 has no bf16")
    tensors = problem(2, queries, past, keys, 64, 48, [(1, 2, 1)], dtype)
    for name in coded:
        tensors[name] = torch.randint(-128, 128, tensors[name].shape, dtype=torch.int8)
        tensors[f"{name}_scales"] = (torch.rand(*tensors[name].shape[:-1], 1) / 64).to(dtype)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(attended(tensors), exact(tensors).to(dtype), rtol=tolerance, atol=tolerance)
