"""The benchmark of training steps: wrong gradients are not timed, ratios are against the best other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import bench_training
from benchmarks.bench_training import Case
from fmtprop.bench import Agreement, Benchmark, Entry, Environment
from fmtprop.bench.interleave import Quartiles
from fmtprop.bench.training import Expected
from fmtprop.capture.factories import Made


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.fixture
def small(monkeypatch):
    torch._dynamo.reset()

    def module(case: Case) -> nn.Module:
        torch.manual_seed(0)
        return Small()

    monkeypatch.setattr(Case, "module", module)
    monkeypatch.setattr(
        Case, "inputs", lambda case: torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    )
    yield Case("resnet50", 4)
    torch._dynamo.reset()


def test_a_case_makes_a_module_with_a_loss(small):
    made = small.trainable()
    assert made.loss(made.module(*made.inputs)).ndim == 0


def test_the_ratio_is_to_the_best_other():
    agreed = Agreement(True, 1e-6, 1e-3)
    times = {"fmtprop": 100.0, "torch": 150.0, "inductor": 120.0}
    entries = tuple(
        Entry(name, agreed, (ms,), Quartiles(ms, ms, ms), Quartiles(*(100 / ms,) * 3)) for name, ms in times.items()
    )
    result = Benchmark("fmtprop", 1, 1, 0, entries, Environment("A CPU", ("avx2",), 4, 2, {}))
    assert bench_training.ratio(result) == pytest.approx(1.2)
    text = bench_training.render([(Case("unet", 4), result)], {"unet × 4, f32": {"torch": 812.0}})
    assert "MISSED, 1.20 ×" in text and "40.0" in text and "812" in text


def test_without_arguments_all_networks_are_measured(capsys):
    assert bench_training.parse([]).networks == list(bench_training.CASES)
    assert bench_training.parse(["lstm"]).networks == ["lstm"]
    with pytest.raises(SystemExit):
        bench_training.parse(["lenet"])
    assert "no network 'lenet'; there are resnet50" in capsys.readouterr().err


def test_a_function_may_return_the_same_module_each_time():
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(64, 2))
    made = Made(module, (torch.randn(2, 3, 6, 6),), torch.sum)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    expected = Expected.of(lambda: made, "f32")
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert module[2].p == 0.5
    assert all(parameter.grad is None for parameter in module.parameters())
    assert max(expected.errors.values()) > 0
