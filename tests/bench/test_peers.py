"""Peers give torch's answers, keep their outputs apart, and say what is missing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from fmtprop.bench import (
    PEERS,
    Inductor,
    OnnxRuntime,
    OpenVINO,
    Peer,
    TorchEager,
    compare_outputs,
    export_onnx,
    peer,
)
from fmtprop.errors import FmtpropError


def small_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 1)).eval()


def an_input(seed: int) -> torch.Tensor:
    return torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def _threads_restored() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def onnx_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    export_onnx(small_module(), (an_input(0),), path)
    return path


def check(candidate: Peer) -> None:
    """Two calls with different inputs; the first answer must survive the second call."""
    module = small_module()
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    run = candidate.prepare(module, (an_input(0),), threads=1)
    first, second = run(an_input(1)), run(an_input(2))
    with torch.no_grad():
        for seed, outputs in ((1, first), (2, second)):
            agreement = compare_outputs(outputs, module(an_input(seed)), tolerance=1e-5)
            assert agreement.passed, agreement.message
    for key, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[key]) and tensor.is_contiguous(), "the caller's module was changed"
    assert all(candidate.versions().values())


@pytest.mark.parametrize("channels_last", [False, True])
def test_torch_eager(channels_last: bool) -> None:
    check(TorchEager(channels_last))
    assert torch.get_num_threads() == 1


def test_channels_last_reaches_weights_and_inputs_of_mixed_ranks() -> None:
    seen = []

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.volume = nn.Conv3d(2, 4, 3, padding=1)
            self.image = nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.is_contiguous(memory_format=torch.channels_last_3d))
            seen.append(self.volume.weight.is_contiguous(memory_format=torch.channels_last_3d))
            seen.append(self.image.weight.is_contiguous(memory_format=torch.channels_last))
            return self.image(self.volume(x).mean(dim=2))

    module = Mixed().eval()
    x = torch.randn(1, 2, 4, 5, 5)
    y = TorchEager(channels_last=True).prepare(module, (x,), threads=1)(x)
    assert seen == [True, True, True]
    assert compare_outputs(y, module(x), tolerance=1e-5).passed


@pytest.mark.peers
def test_onnxruntime(onnx_file: Path) -> None:
    check(OnnxRuntime(onnx_file))


@pytest.mark.peers
def test_openvino(onnx_file: Path) -> None:
    check(OpenVINO("f32", onnx_file))


@pytest.mark.peers
def test_openvino_precision_is_the_one_asked_for_or_an_error(onnx_file: Path) -> None:
    import openvino

    if "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        run = OpenVINO("bf16", onnx_file).prepare(small_module(), (an_input(0),), threads=1)
        agreement = compare_outputs(run(an_input(1)), small_module()(an_input(1)), tolerance=0.05)
        assert agreement.passed and agreement.error > 1e-4
    else:
        with pytest.raises(FmtpropError) as caught:
            OpenVINO("bf16", onnx_file).prepare(small_module(), (an_input(0),), threads=1)
        assert str(caught.value) == (
            "peer openvino bf16: OpenVINO runs f32 on this CPU although bf16 was asked for; leave this peer out here"
        )


@pytest.mark.peers
def test_openvino_reports_its_import_to_nobody() -> None:
    code = """
import multiprocessing, sys
from fmtprop.bench.peers import require
require("openvino", "openvino")
assert "openvino.tools.ovc" in sys.modules  # what reports
assert "openvino_telemetry" not in sys.modules and not multiprocessing.active_children()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_openvino_refuses_unknown_precision() -> None:
    with pytest.raises(FmtpropError, match="peer openvino: precision is 'f8', must be one of f32, bf16, f16"):
        OpenVINO("f8")


@pytest.mark.peers
def test_peers_export_by_themselves() -> None:
    check(OnnxRuntime())


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # torch.compile warns about its own internals
def test_inductor() -> None:
    check(Inductor())


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_inductor_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    torch._dynamo.reset()
    with (
        config.patch({"cpp.cxx": ("/nonexistent/g++",), "force_disable_caches": True}),
        pytest.raises(FmtpropError, match=r"peer inductor: torch.compile failed; it needs a C\+\+ compiler"),
    ):
        Inductor().prepare(small_module(), (an_input(0),), threads=1)


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_missing_package_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    message = f"peer {name}: package '{name}' is not installed; pip install 'fmtprop[bench]'"
    for attempt in (
        lambda: peer(name).prepare(small_module(), (an_input(0),), threads=1),
        lambda: peer(name).versions(),
    ):
        with pytest.raises(FmtpropError) as caught:
            attempt()
        assert str(caught.value) == message


@pytest.mark.peers
@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_missing_exporter_names_the_extra(package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(FmtpropError) as caught:
        export_onnx(small_module(), (an_input(0),), tmp_path / "model.onnx")
    assert str(caught.value) == (
        f"peer onnx export: package {package!r} is not installed; pip install 'fmtprop[bench]'"
    )


@pytest.mark.peers
def test_module_that_torch_cannot_export_is_named(tmp_path: Path) -> None:

    class DataDependent(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(FmtpropError, match="onnx export: torch cannot export DataDependent"):
        export_onnx(DataDependent().eval(), (an_input(0),), tmp_path / "model.onnx")


@pytest.mark.parametrize("precision", ["bf16", "f16"])
def test_eager_computes_in_a_narrow_type_and_changes_no_weight(precision: str) -> None:
    module = small_module()
    run = TorchEager(precision=precision).prepare(module, (an_input(0),), threads=1)
    result = run(an_input(1))
    assert result.dtype is {"bf16": torch.bfloat16, "f16": torch.float16}[precision]
    assert module[0].weight.dtype is torch.float32
    with torch.no_grad():
        assert compare_outputs(result, module(an_input(1)), tolerance=2e-2).passed


def test_peer_names() -> None:
    assert [peer(name).name for name in PEERS] == [
        "torch", "torch channels_last", "torch bf16", "torch f16", "inductor", "inductor bf16", "inductor f16",
        "onnxruntime", "openvino", "openvino bf16", "openvino f16",
    ]  # fmt: skip
    with pytest.raises(FmtpropError) as caught:
        peer("tensorflow")
    assert str(caught.value) == (
        "unknown peer 'tensorflow'; known peers: torch, torch-channels-last, torch-bf16, torch-f16, inductor, "
        "inductor-bf16, inductor-f16, onnxruntime, openvino, openvino-bf16, openvino-f16"
    )


def test_importing_the_room_loads_no_peer() -> None:
    import subprocess

    code = (
        "import sys, fmtprop.bench; print([p for p in ('onnxruntime', 'openvino', 'onnxscript') if p in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
