"""Every op × sample × data type × formats, on oneDNN with real memory, against the op's reference."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib import import_module

import pytest
import torch

from fmtprop import dnnl
from fmtprop.errors import FormatError, UnsupportedOpError
from fmtprop.ir.op import OPSET
from fmtprop.ir.types import TensorType
from fmtprop.ops import OPS, Pooling
from fmtprop.passes.target import is_loop
from tests.ops.lowered import (
    FORMATS,
    conform,
    exact,
    execute,
    judge,
    lower,
    orders_of_axes,
    random_tensors,
    requested,
    typed,
)

#: problems of one op after which the in-place rule counts as shown
ENOUGH = 12

#: without those of which another call makes an operand, such as a workspace
PRIMITIVES = [op for op in OPS if op.primitive is not None and all(op.numbers.checkable(s.attrs) for s in op.samples())]
PROBLEMS = [pytest.param(op, s, id=f"{op.name}-{s.name}") for op in PRIMITIVES for s in op.samples()]

#: whose primitive is a reorder to bytes
TO_BYTES = ("fake_quantize",)


@cache
def runs(dtype):
    """Tell whether this CPU's oneDNN computes convolutions in a type."""
    convolution = OPSET["convolution"]
    sample = next(iter(convolution.samples()))
    return conform(convolution, sample, dtype, "any", limit=1)[0].status != "UNIMPLEMENTED"


def needs(dtype):
    """Skip a test where oneDNN does not compute in a type."""
    if not runs(dtype):
        pytest.skip(f"this CPU's oneDNN does not compute in {dtype}")


def test_every_op_has_samples_with_unique_names_that_infer():
    for op in OPS:
        samples = list(op.samples())
        assert samples, op.name
        assert len({s.name for s in samples}) == len(samples), op.name
        for sample in samples:
            op.check_operands(sample.types)
            inferred = op.infer(sample.attrs, sample.types)
            tensors = random_tensors(sample.types, sample.low, sample.high)
            assert [tuple(t.shape) for t in op.reference(sample.attrs, tensors)] == [t.dims for t in inferred]


def test_every_importer_names_an_overload_and_no_two_ops_claim_one():
    # they make the operators of training, of quantization, and transformers' own
    for module in ("fmtprop.training.capture", "torch.ao.quantization.fx._decomposed", "tests.ops.test_grouped_matmul"):
        import_module(module)
    claimed = {}
    for op in OPS:
        for target in op.torch:
            namespace, packet, overload = target.split(".")
            assert hasattr(getattr(getattr(torch.ops, namespace), packet), overload), target
            assert claimed.setdefault(target, op.name) == op.name, f"{target}: {claimed[target]} and {op.name}"


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("op", "sample"), PROBLEMS)
def test_f32(op, sample, kind):
    (outcome,) = conform(op, sample, "f32", kind, limit=1)
    if op.name in TO_BYTES:
        assert outcome.status == "UNIMPLEMENTED" and "to bytes" in outcome.detail
        return
    if (
        getattr(sample.attrs, "alg", "") in ("log", "soft_relu")
        and "backward" not in op.name
        and not is_loop(outcome.impl)
    ):
        assert outcome.status == "UNIMPLEMENTED" and "logarithms" in outcome.detail  # fmtprop.targets.known_bad
        return
    if outcome.status == "UNIMPLEMENTED" and kind in ("channels_last", "blocked"):
        pytest.skip(outcome.detail.splitlines()[0])
    assert outcome.status == "PASSED", f"{outcome.impl}: {outcome.status} {outcome.detail}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("op", "sample"), PROBLEMS)
def test_every_further_implementation(op, sample, kind):
    for outcome in conform(op, sample, "f32", kind)[1:]:
        assert outcome.status == "PASSED", f"{outcome.impl}: {outcome.status} {outcome.detail}"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize(("op", "sample"), PROBLEMS)
def test_every_implementation_in_every_order_of_axes(op, sample, dtype):
    needs(dtype)
    ndim = max(type_.ndim for type_ in sample.types.values())
    for tag in orders_of_axes(ndim, block=8) if ndim < 5 else ("adebc", "aBdce8b", "caebd"):
        for outcome in conform(op, sample, dtype, tag):
            assert outcome.status in ("PASSED", "UNIMPLEMENTED"), f"{tag} {outcome.impl}: {outcome.detail}"


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize(("op", "sample"), PROBLEMS)
def test_narrow_types(op, sample, dtype):
    needs(dtype)
    outcome = conform(op, sample, dtype, "any", limit=1)[0]
    if outcome.status == "UNIMPLEMENTED":
        pytest.skip(outcome.detail.splitlines()[0])
    assert outcome.status == "PASSED", f"{outcome.impl}: {outcome.detail}"


# ---------------------------------------------------------------- equivalent primitives

#: each op as if one of its equivalents were its own primitive
STAND_INS = [
    pytest.param(replace(op, primitive=e, equivalents=()), id=f"{op.name}{e.__name__}")
    for op in PRIMITIVES
    for e in op.equivalents
]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("op", STAND_INS)
def test_equivalents_compute_what_the_op_means(op, kind):
    tried = 0
    for sample in op.samples():
        for outcome in conform(op, sample, "f32", kind):
            if outcome.status != "UNIMPLEMENTED":
                assert outcome.status == "PASSED", f"{sample.name} {outcome.impl}: {outcome.status} {outcome.detail}"
                tried += 1
    assert tried >= 2


@pytest.mark.parametrize("op", STAND_INS)
def test_equivalents_sum_small_integers_exactly(op):
    tried = 0
    for sample in op.samples():
        for kind in FORMATS:
            try:
                tried += sums_are_exact(op, sample, kind)
            except (UnsupportedOpError, FormatError):
                continue  # another problem than the equivalent's, or formats that it cannot see
    assert tried >= 2 * len(FORMATS)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("op", STAND_INS)
def test_equivalents_compute_in_narrow_types(op, dtype):
    needs(dtype)
    outcomes = [o for sample in op.samples() for o in conform(op, sample, dtype, "any", limit=1)]
    assert {outcome.status for outcome in outcomes} <= {"PASSED", "UNIMPLEMENTED"}
    assert any(outcome.status == "PASSED" for outcome in outcomes)


# ---------------------------------------------------------------- exact arithmetic and NaN

SUMS = [p for p in PROBLEMS if p.values[0].name in ("convolution", "deconvolution", "inner_product", "matmul")]


def sums_are_exact(op, sample, kind):
    """Check the first implementation on integers; return 1."""
    types = typed(op, sample, "f32")
    (result,) = op.infer(sample.attrs, types)
    tensors = {name: tensor.round() for name, tensor in random_tensors(types, -8.0, 8.0).items()}
    lowering = lower(op, sample.attrs, requested(op, types, result, kind))
    got, _ = execute(op, lowering, lowering.pd, tensors)
    assert torch.equal(got, exact(op, sample.attrs, tensors).float()), f"{sample.name} {kind} {lowering.pd.impl}"
    return 1


@pytest.mark.parametrize(("op", "sample"), SUMS)
def test_sums_of_small_integers_are_bit_identical_in_every_format(op, sample):
    for kind in FORMATS:
        try:
            sums_are_exact(op, sample, kind)
        except FormatError:
            assert kind in ("channels_last", "blocked")


#: what passes NaN on as PyTorch does, in every implementation
NAN_SAFE = ("convolution", "deconvolution", "inner_product", "matmul", "batch_normalization", "layer_normalization")


@pytest.mark.parametrize("name", NAN_SAFE)
@pytest.mark.parametrize("kind", FORMATS)
def test_nan_reaches_the_places_that_it_reaches_in_pytorch(name, kind):
    op = OPSET[name]
    sample = next(iter(op.samples()))
    types = typed(op, sample, "f32")
    (result,) = op.infer(sample.attrs, types)
    tensors = random_tensors(types, sample.low, sample.high)
    tensors["src"].view(-1)[50] = torch.nan
    wanted = exact(op, sample.attrs, tensors).isnan()
    assert wanted.any()
    assert not wanted.all()
    lowering = lower(op, sample.attrs, requested(op, types, result, kind))
    for pd in lowering.pd.implementations():
        got, _ = execute(op, lowering, pd, tensors)
        assert torch.equal(got.isnan(), wanted), pd.impl


@pytest.mark.parametrize("kind", FORMATS)
def test_the_documented_exceptions_of_max_pooling(kind):
    op = OPSET["pooling"]
    attrs, types = Pooling.make("max", (2, 2), 2), {"src": TensorType((1, 16, 4, 4))}
    (result,) = op.infer(attrs, types)
    src = torch.zeros(1, 16, 4, 4)
    src[0, 0, 0, 0] = torch.nan
    src[0, 0, 2:, :2] = -torch.inf
    (reference,) = op.reference(attrs, {"src": src})
    assert reference[0, 0, 0, 0].isnan()
    assert reference[0, 0, 1, 0] == -torch.inf
    lowering = lower(op, attrs, requested(op, types, result, kind))
    for pd in lowering.pd.implementations():
        got, _ = execute(op, lowering, pd, {"src": src})
        assert got[0, 0, 0, 0] == 0.0, pd.impl
        assert got[0, 0, 1, 0] == torch.finfo(torch.float32).min, pd.impl


# ---------------------------------------------------------------- dst in the buffer of an operand

INPLACE = [pytest.param(op, name, id=f"{op.name}-{name}") for op in PRIMITIVES for name in sorted(op.inplace)]


@pytest.mark.parametrize(("op", "operand"), INPLACE)
def test_dst_may_take_over_the_operands_that_the_op_names(op, operand):
    tried = 0
    for sample in op.samples():
        types = typed(op, sample, "f32")
        (result,) = op.infer(sample.attrs, types)
        if operand not in types or types[operand].dims != result.dims:
            continue
        for kind in FORMATS:
            lowering = lower(op, sample.attrs, requested(op, types, result, kind))
            formats = lowering.resolve(lowering.pd)
            if formats[operand] != formats[op.results[0].name]:
                continue
            tensors = random_tensors(types, sample.low, sample.high)
            got, _ = execute(op, lowering, lowering.pd, tensors, inplace=operand)
            outcome = judge(got, exact(op, sample.attrs, tensors), "f32")
            assert outcome.status == "PASSED", f"{sample.name} {kind} {lowering.pd.impl}: {outcome.detail}"
            tried += 1
        if tried >= ENOUGH:
            return
    assert tried


# ---------------------------------------------------------------- post-ops

#: without two that have tests of their own: a fused depthwise convolution changes the dims, and a layer normalization
#: has a rounding behind it in a kernel of ours alone
POST_OPS = [
    pytest.param(op, kind, id=f"{op.name}-{kind}")
    for op in PRIMITIVES
    for kind in sorted(op.absorbs.kinds - {"convolution"})
    if (op.name, kind) != ("layer_normalization", "eltwise")
]


def with_post_op(kind, dst, answer):
    """Return (attributes, extra buffers, what dst holds before, the answer after the post-op)."""
    generator = torch.Generator().manual_seed(11)
    post_ops = dnnl.PostOps()
    if kind == "eltwise":
        post_ops.append_eltwise("eltwise_relu", 0.25)
        return dnnl.PrimitiveAttr(post_ops), {}, None, torch.where(answer > 0, answer, 0.25 * answer)
    if kind == "sum":
        before = torch.rand(dst.dims, generator=generator)
        return dnnl.PrimitiveAttr(post_ops.append_sum(1.0)), {}, before, answer + before.double()
    where = int(dnnl.Arg.ATTR_MULTIPLE_POST_OP(0))
    other = torch.rand(dst.dims, generator=generator)
    post_ops.append_binary("binary_add", dnnl.NativeDesc.from_desc(dst))
    return dnnl.PrimitiveAttr(post_ops), {where | int(dnnl.Arg.SRC_1): other}, None, answer + other.double()


@pytest.mark.parametrize(("op", "kind"), POST_OPS)
def test_the_primitive_absorbs_the_post_ops_that_the_op_names(op, kind):
    for sample in op.samples():
        types = typed(op, sample, "f32")
        (result,) = op.infer(sample.attrs, types)
        descs = requested(op, types, result, "any")
        if kind == "binary":
            # the second source lies as dst does: plain here
            descs["dst"] = requested(op, types, result, "plain")["dst"]
        tensors = random_tensors(types, sample.low, sample.high)
        answer = exact(op, sample.attrs, tensors)
        plain_dst = requested(op, types, result, "plain")["dst"]
        attr, extra, before, wanted = with_post_op(kind, plain_dst, answer)
        lowering = lower(op, sample.attrs, descs, attr)
        pd = lowering.pd
        if op.name == "pooling" and kind == "binary":  # fmtprop.targets.known_bad: not in row-major order
            pd = next(one for one in pd.implementations() if not one.impl.startswith("jit"))
        got, _ = execute(op, lowering, pd, tensors, extra=extra, dst=before)
        outcome = judge(got, wanted, result.dtype.value)
        assert outcome.status == "PASSED", f"{sample.name} {pd.impl}: {outcome.status} {outcome.detail}"


# ---------------------------------------------------------------- the harness itself


def test_a_wrong_answer_a_nan_and_an_answer_of_zeros_are_noticed():
    right = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert judge(right.float(), right, "f32").status == "PASSED"
    assert judge(torch.tensor([1.0, 2.0, 3.001]), right, "f32").status == "FAILED"
    assert judge(torch.tensor([1.0, torch.nan, 3.0]), right, "f32").status == "FAILED"
    assert judge(torch.zeros(8), torch.zeros(8, dtype=torch.float64), "f32").status == "MISTRUSTED"
