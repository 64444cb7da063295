"""Models as PyTorch's exporters write them: equal to ONNX Runtime's answers."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import fmtprop as fp
from benchmarks.sweep_models import NETWORKS as SWEEP

pytestmark = [pytest.mark.slow, pytest.mark.peers]

NETWORKS = """resnet18 mobilenet_w1 mobilenetv2b_w1 mobilenetv3_large_w1 squeezenet_v1_1 shufflenetv2b_w1
efficientnet_b0b
densenet169 seresnet18 preresnet18 dla34 ghostnet vgg11 resnext26_32x2d darknet_tiny regnetx004 mnasnet_b1
proxylessnas_mobile peleenet menet228_12x1_g3 fdmobilenet_w1 bninception spnasnet hardnet39ds""".split()
LANGUAGE = ["bert", "distilbert", "roberta", "electra", "albert", "gpt2", "opt", "mpnet", "xlm-roberta", "camembert"]


def exported(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...], dynamo: bool) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        if dynamo:
            program = torch.onnx.export(model, inputs, dynamo=True, verbose=False)
            return program.model_proto.SerializeToString()
        torch.onnx.export(model, inputs, buffer, dynamo=False)
    return buffer.getvalue()


def agrees(data: bytes, model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    """Compare with ONNX Runtime; a network that amplifies rounding errors, with its results in float64.

    Then the errors may be twice those of PyTorch's own results in float32, which tell how much it amplifies.
    """
    import onnxruntime

    from benchmarks.onnx_files import TOLERANCES, error_of

    theirs = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    ours = fp.onnx.InferenceSession(data, policy="propagate", confirm=False)
    feed = {arg.name: x.numpy() for arg, x in zip(theirs.get_inputs(), inputs, strict=True)}
    assert ours.reason is None
    results = ours.run(None, feed)
    if error_of(results, theirs.run(None, feed)) <= TOLERANCES["float"]:
        return
    plain, exact = results_of(model, inputs), results_of(copy.deepcopy(model).double(), [_wide(x) for x in inputs])
    assert error_of(results, exact) <= 2 * error_of(plain, exact)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.is_floating_point() else x


def results_of(model: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> list[Any]:
    with torch.no_grad():
        return [leaf.numpy() for leaf in tree_leaves(model(*inputs))]


@pytest.mark.parametrize("dynamo", [False, True], ids=["torchscript", "dynamo"])
@pytest.mark.parametrize("name", NETWORKS)
def test_image_networks(name, dynamo):
    pytest.importorskip("pytorchcv")
    model, inputs, _ = SWEEP[name]()
    agrees(exported(model.eval(), inputs, dynamo), model, inputs)


class _First(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, use_cache=False)[0] if "gpt" in self.model.config.model_type else self.model(ids)[0]


@pytest.mark.parametrize("name", LANGUAGE)
def test_language_models(name):
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.AutoConfig.for_model(name, vocab_size=99, attn_implementation="eager", **sizes)
    torch.manual_seed(0)
    model = _First(transformers.AutoModel.from_config(config).eval())
    inputs = (torch.randint(3, 90, (2, 7)),)
    agrees(exported(model, inputs, True), model, inputs)
