"""Every built-in graph under every policy gives the outputs of the PyTorch module that it was made from."""

from __future__ import annotations

import warnings
from functools import lru_cache
from pathlib import Path

import pytest
import torch

import fmtprop as fp
from fmtprop import dnnl
from fmtprop.compiling.options import OPTIMAL
from fmtprop.errors import UnsupportedOpError
from fmtprop.passes.assignment.policies import POLICIES
from fmtprop.runtime.agreement import relative_error
from graphs import make
from graphs.architectures import ARCHITECTURES

TEACHING = ("chain", "concat", "residual")

ALL = (*POLICIES, OPTIMAL)

#: without `-m slow`: what shows each policy's mechanics, and the networks of the first page of the README
QUICK = {
    *((name, policy) for name in TEACHING for policy in ALL),
    *(("shufflenet_v2", policy) for policy in ALL),
    ("mobilenet_v2", "propagate"),
    ("resnet50", OPTIMAL),
}

#: f32 sums in another order than PyTorch's
F32 = 1e-4

#: bf16 keeps 8 bits, a rounding of 2**-9 = 0.2 %. Over all layers of these networks the graphs' references, computed
#: in bf16 by PyTorch, come out 0.4 % to 0.9 % off; kernels that sum in another order get three times that.
BF16 = 3e-2

#: f16 keeps 11 bits: an eighth of that
F16 = 4e-3


pytestmark = pytest.mark.usefixtures("cache_of_module")


@lru_cache(maxsize=1)
def example(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an input and what PyTorch makes of it; the tests of one graph follow each other."""
    architecture = ARCHITECTURES[name]
    x = architecture.example_input()
    with torch.no_grad():
        return x, architecture.module()(x)


def cases() -> list[object]:
    return [
        pytest.param(name, policy, marks=() if (name, policy) in QUICK else pytest.mark.slow, id=f"{name}-{policy}")
        for name in ARCHITECTURES
        for policy in ALL
    ]


def test_every_architecture_has_its_graph_file() -> None:
    assert {path.stem for path in Path(make.__file__).parent.glob("*.json")} == set(ARCHITECTURES)


@pytest.mark.parametrize(("name", "policy"), cases())
def test_outputs_are_pytorchs(name: str, policy: str) -> None:
    x, expected = example(name)
    # a false alarm of the plan's own check is a warning, hence an error here
    quick = (name, policy) in QUICK and name not in TEACHING
    net = fp.compile(name, policy=policy, verify="off" if quick else "on")
    assert net.options.policy == policy
    assert relative_error(net(x), expected) < F32


@pytest.mark.parametrize("batch", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", ["plain", "propagate", OPTIMAL])
def test_batches(batch: int, policy: str) -> None:
    architecture = ARCHITECTURES["concat"]
    module = architecture.module()
    x = torch.cat([architecture.example_input(seed=100 * k) for k in range(batch)])
    net = fp.compile(module, x, policy=policy)
    with torch.no_grad():
        assert relative_error(net(x), module(x)) < F32


@pytest.mark.slow
def test_a_batch_of_a_whole_network() -> None:
    architecture = ARCHITECTURES["mobilenet_v2"]
    module = architecture.module()
    x = torch.cat([architecture.example_input(seed=100 * k) for k in range(3)])
    net = fp.compile(module, x)
    with torch.no_grad():
        assert relative_error(net(x), module(x)) < F32


# ---------------------------------------------------------------- bf16


def in_bf16(name: str) -> fp.CompiledModel:
    """Compile in bf16; where the CPU has none, with the documented warning."""
    if dnnl.supports("bf16"):
        return fp.compile(name, dtype="bf16")
    with pytest.warns(
        RuntimeWarning, match=r"onednn has no bf16 on this CPU \(.+\): compute-intensive ops run in f32 instead"
    ):
        return fp.compile(name, dtype="bf16")


@pytest.mark.parametrize(
    "name", [name if name in TEACHING else pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES]
)
def test_bf16_outputs_are_pytorchs_within_its_precision(name: str) -> None:
    x, expected = example(name)
    net = in_bf16(name)
    y = net(x)
    assert y.dtype is torch.float32  # the boundary keeps its type
    error = relative_error(y, expected)
    if dnnl.supports("bf16"):
        assert net.precision == "bf16"
        assert F32 < error < BF16
    else:
        assert net.precision == "f32"
        assert error < F32


@pytest.mark.parametrize(
    "name", [name if name in TEACHING else pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES]
)
def test_f16_outputs_are_pytorchs_within_its_precision_or_an_error(name: str) -> None:
    if not dnnl.supports("f16"):
        with pytest.raises(UnsupportedOpError, match=r"onednn has no f16 on this CPU \(.+\): give dtype='bf16' or"):
            fp.compile(name, dtype="f16")
        return
    x, expected = example(name)
    net = fp.compile(name, dtype=torch.float16)
    y = net(x)
    assert (net.precision, y.dtype) == ("f16", torch.float32)
    assert F32 / 10 < relative_error(y, expected) < F16


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_a_narrow_type_runs_every_product(dtype: str) -> None:
    if not dnnl.supports(dtype):
        pytest.skip(f"oneDNN has no {dtype} on this CPU")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = fp.compile("resnet50", dtype=dtype, verify="off")
    products = [step for step in net.plan.steps if step.node.op in ("convolution", "inner_product")]
    assert {step.operands["src"].desc.dtype.value for step in products} == {dtype}
    assert products[-1].results[0].desc.dtype.value == "f32"  # stores its accumulator: no reorder at the end
