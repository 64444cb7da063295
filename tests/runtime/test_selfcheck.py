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
from fmtprop.layout import MemoryDesc
from fmtprop.runtime import selfcheck
from fmtprop.runtime.plan import Access, Step
from fmtprop.runtime.selfcheck import Mismatch, PassedChecks, check_step, check_steps, key_of
from fmtprop.targets import OneDnnTarget
from fmtprop.tuning.directory import cache_directory
from tests.targets.nodes import chosen, convolution, request


@pytest.fixture
def memory(tmp_path) -> PassedChecks:
    return PassedChecks(tmp_path / "verified.txt")


def step_of(node: Node) -> Step:
    operands = {name: Access(0, desc) for name, desc in node.choice.operands.items()}
    return Step(node, operands, tuple(Access(0, d) for d in node.descs), None, dnnl.Primitive(node.choice.handle))


@pytest.fixture(scope="module")
def right() -> Step:
    node, formats = convolution()
    return step_of(chosen(OneDnnTarget(), node, formats))


def spoil(monkeypatch: pytest.MonkeyPatch, operand: str) -> None:
    """Let the primitive read other numbers than its reference does: what a wrong kernel looks like."""
    honest = selfcheck._packed

    def packed(tensor, desc):
        flat = honest(tensor, desc)
        if desc.dims == operand:
            flat.view(torch.float32)[0] += 1.0
        return flat

    monkeypatch.setattr(selfcheck, "_packed", packed)


# ---------------------------------------------------------------- right and wrong


def test_a_right_primitive_passes(right):
    assert check_step(right) is None


@pytest.mark.parametrize("operand", [(32, 16, 3, 3), (2, 16, 10, 10), (32,)], ids=["weights", "src", "bias"])
def test_one_wrong_element_of_an_operand_is_found(right, monkeypatch, operand):
    spoil(monkeypatch, operand)
    error = check_step(right)
    assert error is not None
    assert error > selfcheck.TOLERANCE[fp.DataType.F32]


def test_a_result_that_is_not_written_is_found(right, monkeypatch):
    monkeypatch.setattr(dnnl.Primitive, "execute", lambda *_: None)
    assert check_step(right) is not None


def test_a_primitive_of_another_op_is_found(right):
    """Same operands, other stride of thought: the primitive forgot the bias."""
    node, formats = convolution()
    bare = chosen(OneDnnTarget(), node, {name: desc for name, desc in formats.items() if name != "bias"})
    tailed = bare.with_(post_ops=())
    assert check_step(step_of(tailed)) is None
    relu = fp.ir.PostOp("eltwise", fp.ops.Eltwise("relu"))
    assert check_step(step_of(tailed.with_(post_ops=(relu,)))) is not None


def test_a_mismatch_names_node_implementation_error_and_reproducer(right, memory, monkeypatch):
    spoil(monkeypatch, (32, 16, 3, 3))
    (mismatch,) = check_steps([right], memory)
    text = str(mismatch)
    impl = re.escape(right.node.choice.impl)
    assert re.fullmatch(
        rf"node conv_1 \(convolution\): {impl} is off by \d\.\de[-+]\d\d relative; reproduce with: benchdnn .*--conv.*",
        text,
    )


def test_nan_in_the_result_is_wrong_and_nan_in_the_reference_is_not_compared():
    want = torch.tensor([1.0, float("nan"), 2.0])
    assert selfcheck._error(torch.tensor([1.0, 5.0, 2.0]), want, fp.DataType.F32) is None
    assert selfcheck._error(torch.tensor([float("nan"), 5.0, 2.0]), want, fp.DataType.F32) == float("inf")
    assert selfcheck._error(torch.zeros(0), torch.zeros(0), fp.DataType.F32) is None


def test_other_types_than_floats_must_be_equal():
    assert selfcheck._error(torch.tensor([1, 2]), torch.tensor([1, 2]), fp.DataType.S32) is None
    assert selfcheck._error(torch.tensor([1, 3]), torch.tensor([1, 2]), fp.DataType.S32) == 0.5


# ---------------------------------------------------------------- what is remembered


def test_what_passed_is_not_checked_again_and_what_failed_is(right, memory, monkeypatch):
    spoil(monkeypatch, (32, 16, 3, 3))
    assert check_steps([right], memory)
    assert key_of(right) not in memory
    assert check_steps([right], memory)
    monkeypatch.undo()
    assert check_steps([right], memory) == []
    assert key_of(right) in memory
    assert key_of(right) in PassedChecks(memory.path)
    monkeypatch.setattr(selfcheck, "check_step", lambda _: pytest.fail("checked again"))
    assert check_steps([right], PassedChecks(memory.path)) == []


def test_equal_steps_are_checked_once(right, memory, monkeypatch):
    twin = dataclasses.replace(right, node=right.node.with_(name="conv_2", origin="elsewhere"))
    assert key_of(twin) == key_of(right)
    counted = []
    monkeypatch.setattr(selfcheck, "check_step", lambda step: counted.append(step.node.name))
    check_steps([right, twin], memory)
    assert counted == ["conv_1"]


def test_steps_of_the_reference_target_are_passed_over(right, memory):
    assert check_steps([dataclasses.replace(right, primitive=None)], memory) == []
    assert key_of(right) not in memory


def test_keys_differ_by_everything_that_a_result_depends_on(right, monkeypatch):
    node, formats = convolution()
    target = OneDnnTarget()
    keys = {key_of(right)}
    for candidate in target.candidates(node, request(node, formats)):
        keys.add(key_of(step_of(node.with_(descs=candidate.results, choice=candidate.choice("")))))
    count = len(keys)
    assert count == len(list(target.candidates(node, request(node, formats))))  # by implementation and format
    relu, tanh = (fp.ir.PostOp("eltwise", fp.ops.Eltwise(alg)) for alg in ("relu", "tanh"))
    for tail in ((relu,), (tanh,), (relu, tanh), (tanh, relu)):
        keys.add(key_of(dataclasses.replace(right, node=right.node.with_(post_ops=tail))))
    attrs = dataclasses.replace(right.node.attrs, strides=(2, 2))
    keys.add(key_of(dataclasses.replace(right, node=right.node.with_(attrs=attrs))))
    monkeypatch.setattr(type(dnnl.lib()), "threads", 77)
    keys.add(key_of(right))
    assert len(keys) == count + 6


def test_the_file_is_of_this_library_and_instruction_set(tmp_path, monkeypatch):
    monkeypatch.setenv("FMTPROP_CACHE_DIR", str(tmp_path))
    path = PassedChecks().path
    assert path.parent == tmp_path == cache_directory()
    assert dnnl.lib().isa in path.name
    assert dnnl.lib().hash[:12] in path.name


def test_without_an_override_the_cache_is_the_users(monkeypatch):
    monkeypatch.delenv("FMTPROP_CACHE_DIR", raising=False)
    assert cache_directory().name == "fmtprop"


def test_garbage_in_the_file_is_ignored(tmp_path, right):
    path = tmp_path / "verified.txt"
    path.write_bytes(b"\xff\xfe not a key\n\n" + key_of(right).encode() + b"\n")
    assert key_of(right) in PassedChecks(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_only_the_library_can_lay_out_is_laid_out_by_it(dtype):
    desc = MemoryDesc((5, 17, 3, 3), dtype, tag="ABcd8b8a")
    numbers = torch.randint(-8, 9, desc.dims, generator=torch.Generator().manual_seed(0)).to(dtype)
    by_library = selfcheck._packed_by_library(numbers, dnnl.NativeDesc.from_desc(desc))
    assert torch.equal(by_library, selfcheck._packed(numbers, desc))


# ---------------------------------------------------------------- in a model


def test_a_model_whose_weights_are_packed_wrongly_is_planned_again_until_it_gives_up(tmp_path, monkeypatch):
    monkeypatch.setenv("FMTPROP_CACHE_DIR", str(tmp_path))
    spoil(monkeypatch, (24, 8, 3, 3))
    module, x = nn.Conv2d(8, 24, 3).eval(), torch.randn(1, 8, 9, 9)
    with (
        pytest.warns(RuntimeWarning, match="planning around it"),
        pytest.raises(fp.PlanError, match=r"primitives keep failing their check; the last: node conv_1"),
    ):
        fp.compile(module, x)


def test_verify_off_checks_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("FMTPROP_CACHE_DIR", str(tmp_path))
    spoil(monkeypatch, (24, 8, 3, 3))
    module, x = nn.Conv2d(8, 24, 3).eval(), torch.randn(1, 8, 9, 9)
    net = fp.compile(module, x, verify="off")
    assert torch.allclose(net(x), module(x), atol=1e-5)
    assert not list(tmp_path.glob("verified-*"))


def test_a_mismatch_without_a_choice_still_prints():
    node, _ = convolution()
    assert str(Mismatch(node, 0.5, "benchdnn --conv")).startswith("node conv_1 (convolution): ? is off by 5.0e-01")
