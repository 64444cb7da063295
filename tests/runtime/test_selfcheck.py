"""A plan's check of itself: wrong primitives are found, right ones are not accused, what passed is remembered."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop import dnnl
from fmtprop.ir.node import Node
from fmtprop.ir.op import OPSET
from fmtprop.ir.types import TensorType
from fmtprop.layout import MemoryDesc
from fmtprop.ops import FakeQuantize
from fmtprop.ops.pooling import Pooling
from fmtprop.passes.assignment.formats import plain
from fmtprop.runtime import selfcheck
from fmtprop.runtime.agreement import TOLERANCE, small_numbers
from fmtprop.runtime.plan import Step
from fmtprop.runtime.selfcheck import Mismatch, check_node, check_steps, likenesses, primitive_key
from fmtprop.store import Store, database
from fmtprop.targets import OneDnnTarget, ReferenceTarget
from fmtprop.targets.bound import Bound
from fmtprop.targets.primitive import laid_out
from fmtprop.targets.pytorch import call_reference
from tests.runtime.checks import around_executions, give_wrong_results, numbers
from tests.targets.nodes import chosen, convolution, node_of, request, step_of


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(tmp_path / "store.sqlite")


def check(step: Step) -> float | None:
    return check_node(step.node, step.executable)


@pytest.fixture(scope="module")
def right() -> Step:
    node, formats = convolution()
    return step_of(chosen(OneDnnTarget(), node, formats))


def spoil(monkeypatch: pytest.MonkeyPatch, operand: str) -> None:
    """Let a primitive read other numbers than its reference does, as a wrong kernel would."""
    around_executions(monkeypatch, before=lambda node, places: numbers(places[operand])[:1].add_(1))


# ---------------------------------------------------------------- right and wrong


def test_a_right_primitive_passes(right):
    assert check(right) is None


@pytest.mark.parametrize("operand", ["weights", "src", "bias"])
def test_one_wrong_element_of_an_operand_is_found(right, monkeypatch, operand):
    spoil(monkeypatch, operand)
    error = check(right)
    assert error is not None
    assert error > TOLERANCE[fp.DataType.F32]


def test_a_result_that_is_not_written_is_found(right, monkeypatch):
    monkeypatch.setattr(Bound, "run", lambda self: None)
    assert check(right) is not None


def test_a_primitive_that_forgot_the_tail_or_the_bias_is_found(right):
    relu = fp.ir.PostOp("eltwise", fp.ops.Eltwise("relu"))
    assert check_node(right.node.with_(post_ops=(relu,)), right.executable) is not None
    node, formats = convolution()
    bare = chosen(OneDnnTarget(), node, {name: desc for name, desc in formats.items() if name != "bias"})
    assert check_node(bare) is None
    with pytest.raises(fp.PlanError, match=r"takes no argument \d+ for operand bias"):
        check_node(right.node.with_(choice=dataclasses.replace(right.node.choice, handle=bare.choice.handle)))


def test_a_mismatch_names_node_implementation_error_and_reproducer(right, store, monkeypatch):
    spoil(monkeypatch, "weights")
    (mismatch,) = check_steps([right], store)
    text = str(mismatch)
    impl = re.escape(right.node.choice.impl)
    assert re.fullmatch(
        rf"node conv_1 \(convolution\): {impl} is off by \d\.\de[-+]\d\d relative; reproduce with: benchdnn .*--conv.*",
        text,
    )


# ---------------------------------------------------------------- what is remembered


def test_what_passed_is_not_checked_again_and_what_failed_is(right, store, monkeypatch):
    spoil(monkeypatch, "weights")
    assert check_steps([right], store)
    assert not store.has_passed(primitive_key(right.node))
    assert check_steps([right], store)
    monkeypatch.undo()
    assert check_steps([right], store) == []
    assert store.has_passed(primitive_key(right.node))
    assert Store(store.path).has_passed(primitive_key(right.node))
    monkeypatch.setattr(selfcheck, "check_node", lambda *_: pytest.fail("checked again"))
    assert check_steps([right], Store(store.path)) == []


def test_equal_steps_are_checked_once(right, store, monkeypatch):
    twin = dataclasses.replace(right, node=right.node.with_(name="conv_2", origin="elsewhere"))
    assert primitive_key(twin.node) == primitive_key(right.node)
    counted = []
    monkeypatch.setattr(selfcheck, "check_node", lambda node, *_: counted.append(node.name))
    check_steps([right, twin], store)
    assert counted == ["conv_1"]


def test_of_steps_that_differ_in_large_sizes_alone_one_is_checked(store, monkeypatch):
    def pooling(channels):
        dims = (1, channels, 6, 6)
        desc, attrs = MemoryDesc(dims, tag="acdb"), Pooling("max", (2, 2), (2, 2), (0, 0), (0, 0), (0, 0))
        node = node_of("pooling", attrs, {"src": TensorType(dims)})
        dst = MemoryDesc(node.results[0].dims, tag="acdb")
        return step_of(chosen(OneDnnTarget(), node, {"src": desc, "dst": dst}))

    steps = [pooling(channels) for channels in (100, 116, 96, 132, 20, 24)]
    counted = []
    monkeypatch.setattr(selfcheck, "check_node", lambda node, *_: counted.append(node.descs[0].dims[1]))
    assert check_steps(steps, store) == []
    assert counted == [100, 96, 132, 20, 24]  # another tail, another power of two, small sizes
    assert not store.has_passed(primitive_key(steps[1].node))
    # a wrong one says nothing about its like
    monkeypatch.setattr(selfcheck, "check_node", lambda *_: 1.0)
    empty = Store(store.path.with_name("empty.sqlite"))
    assert len(check_steps(steps[:2], empty)) == 2


def test_what_is_its_own_reference_is_passed_over(store):
    node, formats = convolution()
    step = step_of(chosen(ReferenceTarget(), node, {name: plain(desc) for name, desc in formats.items()}))
    assert check_steps([step], store) == []
    assert not store.has_passed(primitive_key(step.node))


def test_keys_differ_by_everything_that_a_result_depends_on(right, monkeypatch):
    node, formats = convolution()
    target = OneDnnTarget()
    keys = {primitive_key(right.node)}
    for candidate in target.candidates(node, request(node, formats)):
        keys.add(primitive_key(node.with_(descs=candidate.results, choice=candidate.choice(""))))
    count = len(keys)
    assert count == len(list(target.candidates(node, request(node, formats))))  # by implementation and format
    relu, tanh = (fp.ir.PostOp("eltwise", fp.ops.Eltwise(alg)) for alg in ("relu", "tanh"))
    for tail in ((relu,), (tanh,), (relu, tanh), (tanh, relu)):
        keys.add(primitive_key(right.node.with_(post_ops=tail)))
    attrs = dataclasses.replace(right.node.attrs, strides=(2, 2))
    keys.add(primitive_key(right.node.with_(attrs=attrs)))
    for name, other in (("threads", 77), ("isa", "AVX512_CORE")):  # which the library tells at each question
        with monkeypatch.context() as patch:
            patch.setattr(type(dnnl.lib()), name, other)
            keys.add(primitive_key(right.node))
    for name, other in (("runtime", "SEQ"), ("hash", "another")):
        with monkeypatch.context() as patch:
            patch.setitem(vars(dnnl.lib()), name, other)
            keys.add(primitive_key(right.node))
    assert len(keys) == count + 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_check_lays_numbers_out_as_the_library_does(dtype, monkeypatch):
    desc = MemoryDesc((5, 17, 3, 3), dtype, tag="ABcd8b8a")
    node = node_of("reorder", OPSET["reorder"].attrs(), {"src": TensorType(desc.dims, desc.dtype)})
    way = chosen(OneDnnTarget(), node, {"src": desc, "dst": MemoryDesc(desc.dims, dtype)})
    given = []
    around_executions(monkeypatch, before=lambda node, places: given.append(numbers(places["src"]).clone()))
    assert check_node(way) is None
    by_library = laid_out(small_numbers(way, "src", desc).contiguous(), dnnl.NativeDesc.from_desc(desc))
    assert torch.equal(by_library, given[0].view(torch.uint8))


# ---------------------------------------------------------------- what ran once, on constants


@pytest.fixture
def packing() -> Node:
    """What packs the weights of a convolution."""
    net = fp.compile(nn.Conv2d(8, 24, 3).eval(), torch.randn(1, 8, 9, 9), policy="propagate", verify="off")
    (node,) = net.plan.packed
    return node


def test_what_packs_weights_is_checked(packing, store, monkeypatch):
    assert check_steps([], store, [packing]) == []
    assert store.has_passed(primitive_key(packing))
    spoil(monkeypatch, "src")
    (mismatch,) = check_steps([], Store(store.path.with_name("empty.sqlite")), [packing])
    assert mismatch.node is packing
    assert "--reorder" in str(mismatch)


@pytest.mark.usefixtures("own_cache")
def test_a_step_is_checked_with_what_packed_its_weights(monkeypatch):
    """And that is planned around where the step is right without it."""
    module, x = nn.Conv2d(8, 24, 3).eval(), torch.randn(1, 8, 9, 9)
    first = fp.compile(module, x, policy="propagate", verify="off")
    (packer,) = first.plan.packed
    assert [step.packing for step in first.plan.steps if step.packing] == [{"weights": packer}]
    wrong = packer.choice.impl, packer.descs
    give_wrong_results(monkeypatch, lambda node: (node.choice.impl, node.descs) == wrong)
    with pytest.warns(RuntimeWarning, match=r"node reorder\w* \(reorder\): .* is off by .*; planning around it"):
        net = fp.compile(module, x, policy="propagate")
    assert wrong not in [(node.choice.impl, node.descs) for node in net.plan.packed]
    assert torch.allclose(net(x), module(x), atol=1e-5)


def test_what_only_the_library_can_read_is_passed_over(packing, store):
    opaque = MemoryDesc.opaque(packing.results[0].dims, "f32", 1 << 16, "the library's")
    assert check_steps([], store, [packing.with_(descs=(opaque,))]) == []
    assert not store.has_passed(primitive_key(packing.with_(descs=(opaque,))))


# ---------------------------------------------------------------- in a model


@pytest.mark.usefixtures("own_cache")
def test_a_model_whose_primitives_are_all_wrong_is_planned_again_until_pytorch_runs_it(monkeypatch):
    give_wrong_results(monkeypatch, lambda node: node.choice.target == "onednn")
    module, x = nn.Conv2d(8, 24, 3).eval(), torch.randn(1, 8, 9, 9)
    with pytest.warns(RuntimeWarning) as caught:
        net = fp.compile(module, x)
    assert "planning around it" in str(caught[0].message)
    # attempts are used up, or reorders: which of them depends on how many implementations the instruction set has
    assert "without what failed: " in str(caught[-1].message)
    assert {step.target for step in net.plan.steps} == {"reference"}
    assert torch.allclose(net(x), module(x), atol=1e-5)


@pytest.mark.usefixtures("own_cache")
def test_verify_off_checks_nothing(monkeypatch):
    give_wrong_results(monkeypatch, lambda node: True)
    module, x = nn.Conv2d(8, 24, 3).eval(), torch.randn(1, 8, 9, 9)
    net = fp.compile(module, x, verify="off")
    assert torch.allclose(net(x), module(x), atol=1e-5)
    assert "check" not in {kind for kind, _ in database.read(Store().path, timeout=1.0)[0]}


def test_a_mismatch_without_a_choice_still_prints():
    node, _ = convolution()
    assert str(Mismatch(node, 0.5, "benchdnn --conv")).startswith("node conv_1 (convolution): ? is off by 5.0e-01")


@pytest.mark.parametrize(("after", "lowest"), [(torch.relu, -2.0), (lambda x: x.abs().sqrt(), 0.25)])
def test_numbers_before_a_root_are_positive(after, lowest):
    """Results near zero would lose their digits in it."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(16, 16, 3)

        def forward(self, x):
            return after(self.conv(x))

    net = fp.compile(Net(), torch.randn(1, 16, 9, 9), tune="model", confirm=False)
    (node,) = [step.node for step in net.plan.steps if step.node.op == "convolution"]
    assert node.post_ops and float(small_numbers(node, "src", MemoryDesc((1, 16, 9, 9), "f32")).min()) == lowest


def test_a_few_results_that_a_post_op_makes_tiny_are_no_alarm(monkeypatch):
    """Mish of a sum of -9 is -1e-3, with the rounding errors of numbers near 1."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.row = torch.nn.Parameter(torch.ones(1, 12))

        def forward(self, x):
            return torch.nn.functional.mish(torch.nn.functional.linear(x, self.row))

    net = fp.compile(Net(), torch.randn(1, 12), tune="model", confirm=False)
    (step,) = [step for step in net.plan.steps if step.node.post_ops]
    operand = MemoryDesc((1, 12), "f32")
    monkeypatch.setattr(
        selfcheck, "_small", lambda node, name, _=None: torch.full(operand.dims, -0.75 if name == "src" else 1.0)
    )
    assert (
        float(call_reference(step.node, {"src": torch.full((1, 12), -0.75), "weights": torch.ones(1, 12)})[0]) > -2e-3
    )
    assert check(step) is None
    around_executions(monkeypatch, after=lambda node, places: numbers(places["dst"]).add_(1e-4))
    assert check(step) is not None


def test_a_later_shape_is_checked_once_where_more_than_sizes_differs(store, monkeypatch):
    def plan(*shape):
        return fp.compile(nn.Conv2d(16, 32, 3, padding=1), torch.randn(*shape), policy="plain", verify="off").plan

    first, longer, tail, other = plan(2, 16, 32, 48), plan(5, 16, 64, 96), plan(2, 16, 32, 41), plan(3, 16, 48, 57)
    rows, single, longer_tail = plan(2, 16, 13, 48), plan(2, 16, 1, 48), plan(3, 16, 48, 61)
    known = likenesses(first)
    ran = []
    monkeypatch.setattr(selfcheck, "check_node", lambda node, *_: ran.append(node.name))
    assert check_steps(longer.steps, store, longer.packed, known) == []
    assert ran == []
    assert check_steps(tail.steps, store, tail.packed, known) == []
    assert ran
    ran.clear()
    for alike in (other, longer_tail):
        assert check_steps(alike.steps, store, alike.packed, known) == []
    assert ran == []
    assert check_steps(rows.steps, store, rows.packed, known) == []
    assert ran == []
    assert check_steps(single.steps, store, single.packed, known) == []
    assert ran


@pytest.mark.parametrize("grid", ["src", "dst"])
def test_elements_that_share_a_position_have_one_number(grid):
    """An expanded tensor that is rounded: MobileViTv2 in int8 lost its plan to the check."""
    attrs = FakeQuantize(0.02, -118, 137)
    node = node_of("fake_quantize", attrs, {"src": TensorType((1, 6, 4, 7))}).with_(grids={grid: attrs.grid})
    repeated = MemoryDesc((1, 6, 4, 7), "u8" if grid == "src" else "f32", strides=(24, 4, 1, 0))
    numbers = small_numbers(node, "src", repeated)
    assert numbers.shape == (1, 6, 4, 7) and torch.equal(numbers, numbers[..., :1].expand(1, 6, 4, 7))


@pytest.mark.parametrize("make", [lambda size: nn.Upsample(scale_factor=2.0), nn.AvgPool2d], ids=["resized", "average"])
def test_a_later_shape_is_not_checked_for_sizes_among_attributes(make, store, monkeypatch):
    def plan(size):
        return fp.compile(make(size), torch.randn(1, 64, size, size), policy="plain", verify="off").plan

    first, later = plan(32), plan(64)
    monkeypatch.setattr(selfcheck, "check_node", None)
    assert check_steps(later.steps, store, later.packed, likenesses(first)) == []


def test_a_later_shape_is_checked_for_another_window(store, monkeypatch):
    def plan(window):
        return fp.compile(nn.AvgPool2d(window), torch.randn(1, 8, 36, 36), policy="plain", verify="off").plan

    first, *others = plan(2), plan(3), plan(36)
    ran = []
    monkeypatch.setattr(selfcheck, "check_node", lambda node, *_: ran.append(node.name))
    for other in others:
        assert check_steps(other.steps, store, other.packed, likenesses(first)) == []
    assert len(ran) == len(others)


def test_a_scalar_has_a_likeness():
    class Exponential(nn.Module):
        def forward(self, s: torch.Tensor) -> torch.Tensor:
            return s.exp() + 1

    plan = fp.compile(Exponential(), torch.tensor(2.0), policy="plain", verify="off").plan
    assert len(likenesses(plan)) == len(plan.steps) > 0
