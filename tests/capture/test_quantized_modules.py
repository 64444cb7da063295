"""Quantized modules of PyTorch's libraries: the numbers of the module itself, by both doors, and products of bytes."""

from __future__ import annotations

import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import FakeQuantize, disable_observer

import fmtprop as fp
from fmtprop.errors import InputError

#: of the largest number: a number in the middle between two may be rounded to the other side, once or twice in a result
TOLERANCE = 0.02


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 17, 3, padding=1), nn.BatchNorm2d(17), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(17, 32, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    ).eval()  # fmt: skip


def image(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


class Simulated(nn.Module):
    """Quantization as NNCF and quantization-aware training write it: PyTorch's own pairs, on weights of f32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(3, 16, 3), nn.Linear(16, 5)
        self.scale: torch.Tensor
        self.register_buffer("scale", self.conv.weight.detach().abs().amax((1, 2, 3)) / 127)
        self.register_buffer("zeros", torch.zeros(16, dtype=torch.int32))
        self.register_buffer("step", torch.tensor(0.03))
        self.register_buffer("zero", torch.tensor(100, dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.fake_quantize_per_tensor_affine(x, 0.02, 128, 0, 255)
        w = torch.fake_quantize_per_channel_affine(self.conv.weight, self.scale, self.zeros, 0, -127, 127)
        y = torch.conv2d(x, w, self.conv.bias).relu()
        y = torch.fake_quantize_per_tensor_affine(y, self.step, self.zero, 0, 255)
        return self.head(y.mean((2, 3)))


def quantized() -> nn.Module:
    pytest.importorskip("torchao")
    return fp.quantize(network(), [image(seed) for seed in range(4)])


def products_of_bytes(graph: Any) -> int:
    products = [node for node in graph.nodes() if node.op in ("convolution", "inner_product", "matmul")]
    return sum({"src", "weights"} <= node.grids.keys() for node in products)


@pytest.mark.parametrize("make, bytes_", [(quantized, 3), (Simulated, 1)])
def test_a_quantized_module_means_itself_by_both_doors(make: Any, bytes_: int) -> None:
    module, x = make(), image(9)
    with torch.no_grad():
        expected = module(x)
    net = fp.compile(module, x, policy="propagate", confirm=False)
    assert products_of_bytes(net.compilation.normal) == bytes_
    for result in (net(x), torch.compile(module, backend="fmtprop")(x)):
        assert (result - expected).abs().max() <= TOLERANCE * expected.abs().max()


def test_a_layer_that_runs_twice_is_quantized_as_two() -> None:
    pytest.importorskip("torchao")

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.act = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.act(x)
            return self.act(self.second(self.act(self.first(x))) + x)

    made = fp.quantize(Residual().eval(), [image(seed) for seed in range(4)])
    assert products_of_bytes(fp.compile(made, image(9), policy="propagate", confirm=False).compilation.normal) == 2


def test_quantize_takes_what_the_module_takes() -> None:
    pytest.importorskip("torchao")

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return self.layer(a + b)

    module, x = Two().eval(), torch.randn(3, 8)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    batch = torch.export.Dim("batch", min=1, max=64)
    made = fp.quantize(module, [(x, x), (x[:2], x[:2])], dynamic_shapes={"a": {0: batch}, "b": {0: batch}})
    with torch.no_grad():
        assert (made(x, x) - module(x, x)).abs().max() < 0.1 * module(x, x).abs().max()
        assert torch.allclose(fp.compile(made, (x, x))(x, x), made(x, x), atol=0.02)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize(
    "module, data, said",
    [
        (network(), [], "calibration_data is empty"),
        (network(), torch.ones(2, 3, 8, 8), "calibration_data is one tensor: pass a list of inputs"),
        (network().train(), [image()], "call module.eval"),
        (network(), [image(), image() * float("nan")], "item 1 of calibration_data has NaN"),
        (lambda x: x, [image()], "takes a torch.nn.Module, got function"),
    ],
)
def test_quantize_says_what_it_needs(module: Any, data: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        fp.quantize(module, data)


@pytest.mark.parametrize("kind", ["dynamic", "static", "weights"])
def test_modules_of_torchao_with_codes_for_weights(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32)).eval()
    configs = {
        "dynamic": quantization.Int8DynamicActivationInt8WeightConfig,
        "weights": quantization.Int8WeightOnlyConfig,
        "static": lambda: quantization.Int8StaticActivationInt8WeightConfig(
            act_quant_scale=torch.full((1, 1), 0.03), granularity=quantization.PerTensor()
        ),
    }
    quantization.quantize_(module, configs[kind]())
    x = torch.randn(16, 64)
    net = fp.compile(module, x)
    if kind == "dynamic":
        found = [node.op for node in net.compilation.normal.nodes()]
        assert found.count("dynamic_quantize") == 2 and "aten" not in found
    with torch.no_grad():
        own, behind = module(x), torch.compile(module, backend="fmtprop")(x)
        # without VNNI, PyTorch's product of bytes saturates; behind torch.compile it may be the faster one
        monkeypatch.setattr(torch, "_int_mm", lambda a, b: (a.double() @ b.double()).to(torch.int32))
        exact = module(x)
        most = TOLERANCE * exact.abs().max()
        assert (net(x) - exact).abs().max() <= most
        assert min((behind - exact).abs().max(), (behind - own).abs().max()) <= most


@pytest.mark.parametrize("rows", [1, 5])
def test_scales_of_rows_in_bf16_are_those_of_torchao(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model in bf16 rounds its scales to bf16: a layer is one quantization and one product of bytes all the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32)).bfloat16().eval()
    quantization.quantize_(module, quantization.Int8DynamicActivationInt8WeightConfig())
    x = torch.randn(rows, 64).bfloat16()
    net = fp.compile(module, x)
    found = [node.op for node in net.compilation.normal.nodes()]
    assert found.count("dynamic_quantize") == 2 and "aten" not in found
    # without VNNI, PyTorch's product of bytes saturates
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: (a.double() @ b.double()).to(torch.int32))
    with torch.no_grad():
        wanted = module(x)
    torch.testing.assert_close(net(x), wanted, rtol=2**-6, atol=float(wanted.abs().max()) * 2**-6)


class Trained(nn.Module):
    """A layer with the modules of PyTorch's quantization-aware training, which branch on their own flags."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 8, 3, padding=1)
        self.before, self.behind = (FakeQuantize(quant_min=0, quant_max=255, dtype=torch.quint8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.behind(torch.relu(self.layer(self.before(x))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("enabled", [1, 0])
def test_flags_of_a_module_decide_its_branches(enabled: int) -> None:
    module, x = Trained(), torch.randn(2, 3, 8, 8)
    module(x)
    module.eval().apply(disable_observer)
    for one in (module.before, module.behind):
        one.fake_quant_enabled[0] = enabled
    net = fp.compile(module, x, policy="propagate", confirm=False)
    assert (net.compilation.normal.count("fake_quantize") > 0) == bool(enabled)
    with torch.no_grad():
        assert (net(x) - module(x)).abs().max() <= 1.01 * module.behind.scale.item()


def test_a_flag_that_the_forward_pass_changes_decides_no_branch() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls[0] += 1
            return x + 1 if self.calls[0] == 1 else x - 1

    with pytest.raises(fp.ImportModelError, match="takes a branch or a size from a tensor's values"):
        fp.compile(Counting(), torch.ones(2))


def test_a_module_of_nncf() -> None:
    nncf = pytest.importorskip("nncf")
    exported = torch.export.export(network(), (image(),)).module()
    module, x = nncf.quantize(exported, nncf.Dataset([image(seed) for seed in range(3)])), image(9)
    with torch.no_grad():
        expected = module(x)
    net = fp.compile(module, x, policy="propagate", confirm=False)
    assert (net(x) - expected).abs().max() <= TOLERANCE * expected.abs().max()
    assert products_of_bytes(net.compilation.normal)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_none_is_one_error(scale: float) -> None:
    import_module("torch.ao.quantization.fx._decomposed")  # defines the operators

    class Wrong(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = torch.ops.quantized_decomposed
            stored = q.quantize_per_tensor(x, scale, 0, 0, 255, torch.uint8)
            return q.dequantize_per_tensor(stored, scale, 0, 0, 255, torch.uint8)

    message = r"node quantize_1 .*its scale is .*must be positive and finite"
    with pytest.raises(fp.PassError, match=message):
        fp.compile(Wrong(), torch.randn(2, 3))
    with torch.no_grad(), pytest.raises(fp.PassError, match=message):
        torch.compile(Wrong(), backend="fmtprop")(torch.randn(2, 3))


def test_the_file_of_a_quantized_module_opens_in_a_new_process(tmp_path: Path) -> None:
    module, x, file = quantized(), image(9), tmp_path / "quantized.pt2"
    torch.export.save(torch.export.export(module, (x,)), file)
    net = fp.compile(str(file), policy="propagate", confirm=False)
    with torch.no_grad():
        expected = module(x)
    assert (net(x) - expected).abs().max() <= TOLERANCE * expected.abs().max()
    code = f"import fmtprop as fp; print(fp.load({str(file)!r}).count('quantize'))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(ran.stdout) > 0


class Decompressed(nn.Module):
    """Weights of int8 as NNCF writes them: a product with scales, minus zeros."""

    def __init__(self) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(0)
        self.codes: torch.Tensor
        self.register_buffer("codes", torch.randint(-128, 128, (8, 3, 3, 3), dtype=torch.int8, generator=drawn))
        self.register_buffer("scale", 0.01 + 0.01 * torch.rand(8, 1, 1, 1, generator=drawn))
        self.register_buffer("zeros", torch.zeros(8, 1, 1, 1, dtype=torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.fake_quantize_per_tensor_affine(x, 0.02, 128, 0, 255)
        return torch.conv2d(x, self.codes * self.scale - self.zeros)


def test_decompressed_weights_are_integers() -> None:
    module, x = Decompressed().eval(), image(9)
    net = fp.compile(module, x, policy="propagate", confirm=False)
    assert products_of_bytes(net.compilation.normal) == 1
    assert torch.allclose(net(x), module(x), atol=1e-4)
    module.codes = module.codes.float() + 0.5  # no integers
    net = fp.compile(module, x, policy="propagate", confirm=False)
    assert products_of_bytes(net.compilation.normal) == 0
    assert torch.allclose(net(x), module(x), atol=1e-4)


@pytest.mark.parametrize("item", [(torch.ones(1, 4, 8, 8),), ("text",)])
def test_data_that_do_not_fit_the_module_are_named(item):
    module = torch.nn.Conv2d(3, 8, 3).eval()
    with pytest.raises(fp.errors.InputError, match="Conv2d cannot run item 0 of calibration_data"):
        fp.quantize(module, [item])
    with pytest.raises(fp.errors.InputError, match="Conv2d cannot run item 1 of calibration_data"):
        fp.quantize(module, [torch.ones(1, 3, 8, 8), item])
