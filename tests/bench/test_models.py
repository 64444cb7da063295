from __future__ import annotations

import pytest
import torch

from fmtprop.bench import TorchEager
from fmtprop.bench.models import choose_peers, race
from fmtprop.errors import FmtpropError
from fmtprop.frontends import from_torch, load


class Watcher(TorchEager):
    """Says in its process what it was given."""

    def prepare(self, module, example_inputs, threads):
        weights = sum(p.numel() for p in module.parameters())
        if (weights, threads, torch.get_num_threads()) != (896, 1, 1):
            raise FmtpropError(f"was given {weights} weights and {threads} threads")
        if [tuple(x.shape) for x in example_inputs] != [(1, 3, 32, 32)]:
            raise FmtpropError("was given other inputs")
        return super().prepare(module, example_inputs, threads)


class Wrong(TorchEager):
    name = "wrong"

    def prepare(self, module, example_inputs, threads):
        return lambda *inputs: 2 * module(*inputs) + 1


def test_everyone_gets_the_same_and_the_text_says_what_came_out():
    told = []
    result = race(
        load("chain"),
        [Watcher(), Wrong()],
        threads=1,
        rounds=2,
        progress=lambda what, done, total: told.append((what, done)),
    )
    assert result.environment.threads == 1
    assert [entry.name for entry in result.entries] == ["fmtprop", "torch", "wrong"]
    assert result.reference == "torch" and result["fmtprop"].speedup is not None
    assert told[0] == ("preparing fmtprop", 0) and told[-1] == ("timing", 4)
    text = result.to_text()
    assert "speed-up over torch" in text and "threads of" in text
    (row,) = [line for line in text.splitlines() if line.startswith("│ wrong")]
    assert row.count("not timed") == 2
    (failure,) = result.failures
    assert failure.startswith("wrong disagrees with the oracle and was not timed: output 0: largest relative error")
    assert failure[:80] in text


def test_nested_arguments_and_results_are_flattened():
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor, more: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {"sum": x + more["y"], "relu": x.relu()}

    graph = from_torch(Net().eval(), (torch.randn(2, 3), {"y": torch.randn(2, 3)}))
    result = race(graph, [TorchEager()], rounds=1)
    assert result.failures == ()
    assert graph.structure, "the graph itself keeps its structure"


def test_peers_are_checked_before_the_work():
    with pytest.raises(FmtpropError, match="no peer to compare with; give at least one, such as torch"):
        choose_peers([])
    with pytest.raises(FmtpropError, match="no peer to compare with"):
        race(load("chain"), [])
    with pytest.raises(FmtpropError, match="peer 'torch' is given twice"):
        choose_peers(["torch", "torch"])
    with pytest.raises(FmtpropError, match="unknown peer 'tflite'; known peers: torch"):
        choose_peers(["tflite"])


@pytest.mark.peers
def test_the_other_runtimes():
    names = ["torch", "onnxruntime", "openvino"]
    result = race(load("residual"), choose_peers(names), rounds=1, repeats=1)
    assert result.failures == ()
    assert set(result.environment.versions) >= {"onnxruntime", "openvino"}
