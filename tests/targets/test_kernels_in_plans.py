"""Kernels that run instead of a primitive: offered where they serve, run and checked by plans, replaced where wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fmtprop
from fmtprop.ir.types import TensorType
from fmtprop.jit import Kernel, rows, unavailable
from fmtprop.jit.kernel import takes
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops import Binary, Pooling
from fmtprop.passes.assignment.formats import channels_last, like
from fmtprop.runtime import selfcheck
from fmtprop.targets import OneDnnTarget
from fmtprop.targets.kernel import JIT
from fmtprop.tuning.identity import describe
from tests.targets.nodes import node_of, request
from tests.threads import torch_threads

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

AVERAGE, MUL = Pooling.make("avg_include_padding", (5, 7)), Binary("mul")
IMAGE = (2, 32, 5, 7)


def typed(dtype="f32", **dims):
    return {name: TensorType(size, DataType(dtype)) for name, size in dims.items()}


def offered(op, attrs, types):
    """Return the nodes as kernels run them: operands channels-last, the result as it likes."""
    node = node_of(op, attrs, types)
    asked = {name: channels_last(MemoryDesc(type_.dims, type_.dtype)) for name, type_ in types.items()}
    found = OneDnnTarget().candidates(node, request(node, asked))
    return [node.with_(descs=c.results, choice=c.choice("offered")) for c in found if c.target == JIT]


APPLICABLE = [
    pytest.param("pooling", AVERAGE, typed(src=IMAGE), id="average"),
    pytest.param("pooling", Pooling.make("avg_exclude_padding", (40,)), typed(src=(1, 48, 40)), id="average of rows"),
    pytest.param("pooling", Pooling.make("avg_exclude_padding", (2, 3, 4)), typed(src=(1, 16, 2, 3, 4)), id="3d"),
    pytest.param("binary", MUL, typed(src_0=IMAGE, src_1=(1, 32, 1, 1)), id="scale"),
    pytest.param("binary", MUL, typed(src_0=IMAGE, src_1=(2, 32, 1, 1)), id="scale each"),
    pytest.param("binary", MUL, typed(src_0=(1, 96, 60), src_1=(1, 96, 1)), id="scale rows"),
]


@pytest.mark.parametrize(("op", "attrs", "types"), APPLICABLE)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_each_is_offered_and_passes_the_plans_own_check(op, attrs, types, dtype):
    if dtype == "bf16" and not takes(DataType.BF16):
        pytest.skip("this CPU does not round to bf16")
    (node,) = offered(op, attrs, {name: TensorType(t.dims, DataType(dtype)) for name, t in types.items()})
    assert node.choice.impl.partition(":")[0] == ("average" if op == "pooling" else "broadcast_mul")
    assert selfcheck.check_node(node) is None
    assert "kernel" in node.choice.handle.repro


def test_whole_numbers_that_are_no_codes_have_a_maximum():
    """ONNX's test_maxpool_2d_uint8 ended in a KeyError: bytes without a grid have no average, and were asked for it."""
    assert offered("pooling", Pooling.make("max", (2, 2)), typed("u8", src=IMAGE)) == []


def test_figures_are_kept_by_the_code_that_they_are_of():
    node = node_of("pooling", AVERAGE, typed(src=IMAGE))
    asked = request(node, {"src": channels_last(MemoryDesc(IMAGE))})
    found = list(OneDnnTarget().candidates(node, asked))
    keys = [describe(node, candidate, 0) for candidate in found]
    assert [key.get("kernel") for key in keys if key["target"] == JIT] == [found[-1].handle.kernel.fingerprint]
    assert all("kernel" not in key for key in keys if key["target"] != JIT)


# ---------------------------------------------------------------- in plans


class Gate(nn.Module):
    """Squeeze and excitation between two convolutions, as in EfficientNet."""

    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        self.before = nn.Conv2d(8, channels, 3, padding=1)
        self.reduce, self.expand = nn.Conv2d(channels, 8, 1), nn.Conv2d(8, channels, 1)
        self.after = nn.Conv2d(channels, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.silu(self.before(x))
        gate = nn.functional.adaptive_avg_pool2d(x, 1)
        return self.after(x * torch.sigmoid(self.expand(nn.functional.silu(self.reduce(gate)))))


@pytest.fixture
def gate() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Gate().eval(), torch.randn(2, 8, 24, 24)


def kernels(plan):
    return [step for step in plan.steps if step.target == JIT]


def compiled(module, x, **options):
    """Compile with channels-last activations, which a network this small might not choose."""
    first = MemoryDesc(tuple(x.shape), tag="nhwc")
    return fmtprop.compile(module, x, boundary={"x": first}, pin={"conv_1.dst": "nhwc"}, confirm=False, **options)


@pytest.mark.usefixtures("usual_peaks")
def test_a_network_runs_them_and_tells_so(gate):
    module, x = gate
    net = compiled(module, x)
    assert {step.node.op for step in kernels(net.plan)} == {"pooling", "binary"}
    torch.testing.assert_close(net(x), module(x), atol=1e-5, rtol=1e-5)
    assert JIT in {row.target for row in net.report(repeats=1).steps}
    assert len(net.profile(x)) == len(net.plan.steps)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_plan_for_other_threads_runs_them_too(gate, threads):
    module, x = gate
    net = compiled(module, x)
    other = net.compilation.plan_for(threads)
    assert [s.node.choice.impl for s in kernels(other)] == [s.node.choice.impl for s in kernels(net.plan)]
    with torch_threads(threads):
        torch.testing.assert_close(net(x), module(x), atol=1e-5, rtol=1e-5)


def test_runs_side_by_side_do_not_share_sums(gate):
    module, x = gate
    net = compiled(module, x)
    inputs = [torch.randn_like(x) for _ in range(24)]
    with net.throughput(3) as pool:
        for got, given in zip(pool.map(inputs), inputs, strict=True):
            torch.testing.assert_close(got, module(given), atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("usual_peaks")
def test_one_that_is_wrong_is_found_and_replaced(gate, monkeypatch):
    module, x = gate
    for kind in (rows.AverageKernel, rows.BroadcastKernel):
        monkeypatch.setattr(kind, "assembled", lambda self: Kernel("wrong", b"\xc3"))  # returns at once
    with pytest.warns(RuntimeWarning, match="(average|broadcast_mul):.* is off by"):
        net = compiled(module, x)
    assert kernels(net.plan) == []
    torch.testing.assert_close(net(x), module(x), atol=1e-5, rtol=1e-5)


def test_nan_spreads_as_in_pytorch(gate):
    module, x = gate
    x[1, 3, 5, 7] = float("nan")
    got, expected = compiled(module, x)(x), module(x)
    assert torch.equal(got.isnan(), expected.isnan()) and got[1].isnan().any() and not got[0].isnan().any()


@pytest.mark.usefixtures("usual_peaks")
def test_the_product_of_two_halves_of_channels_is_a_kernel():
    """NAFNet's gate: no copy of the halves, and no operator of PyTorch."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.Conv2d(8, 64, 1), nn.Conv2d(32, 16, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = self.before(x).chunk(2, dim=1)
            return self.after(first * second)

    module, x = Halves().eval(), torch.randn(1, 8, 56, 56)
    net = compiled(module, x)
    (step,) = kernels(net.plan)
    assert step.node.op == "binary"
    torch.testing.assert_close(net(x), module(x), atol=1e-5, rtol=1e-5)


def test_a_slice_has_the_format_of_its_tensor_wherever_it_begins():
    part = MemoryDesc((1, 9, 32), "f32").submemory((1, 8, 32), (0, 1, 0))
    assert like(MemoryDesc((1, 1, 32), "f32"), part) == MemoryDesc((1, 1, 32), "f32")
