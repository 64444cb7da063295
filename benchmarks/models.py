"""The models that are measured: graph, module, inputs and ONNX file of one size of batch, the same weights in each.

Graphs have one batch size. Others are exported anew from the same architecture with the same seeded weights, which
takes torch a while; the files are kept in the user's cache directory, under a key of what they were made from.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.sweep_models import NETWORKS
from benchmarks.sweep_network import settle
from fmtprop.api import random_inputs
from fmtprop.bench.compare import tensors_of
from fmtprop.capture import from_torch, load
from fmtprop.errors import FmtpropError
from fmtprop.ir import file
from fmtprop.ir.graph import Graph
from fmtprop.store import cache_directory
from graphs.architectures import ARCHITECTURES
from graphs.make import FOLDER, describe_weights

__all__ = ["TEN", "Model", "Network", "model"]

#: what the project is judged by
TEN = (
    *("resnet50", "mobilenet_v2", "vgg16", "densenet121", "inception_v3", "efficientnet_b0", "shufflenet_v2"),
    *("convnext_t", "bert_base", "vit_b16"),
)


@dataclass(frozen=True)
class Model:
    """A model and how many inputs it takes at a time.

    >>> [Model("chain", batch).graph().input_nodes[0].results for batch in (1, 4)]
    [(f32[1,3,32,32],), (f32[4,3,32,32],)]
    """

    #: a built-in graph; for batch 1 also a file
    name: str
    batch: int = 1

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise FmtpropError(f"{self.name}: batch is {self.batch}, must be at least 1")
        if self.batch > 1 and self.name not in ARCHITECTURES:
            raise FmtpropError(
                f"{self.name}: a graph has one batch size; {self.batch} are possible for the built-in models only "
                f"({', '.join(ARCHITECTURES)})"
            )

    def __str__(self) -> str:
        return self.name if self.batch == 1 else f"{self.name} × {self.batch}"

    def graph(self) -> Graph:
        """Return the graph, imported; its weights are initialisers where the model is built in."""
        if self.batch == 1:
            return load(self.name)
        path = self._folder() / "graph.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # a file that is there is complete
                file.save(self._imported(), Path(folder) / path.name, weights="inline")
                (Path(folder) / path.name).rename(path)
        return load(path)

    def module(self) -> Callable[[], nn.Module] | None:
        """Return what makes the module that the graph was imported from; ``None`` for a file."""
        return partial(_module, self.name) if self.name in ARCHITECTURES else None

    def inputs(self) -> list[torch.Tensor]:
        """Return inputs, another one for each place in the batch."""
        if self.name not in ARCHITECTURES:
            return random_inputs(self.graph())
        example = ARCHITECTURES[self.name].example_input
        return [torch.cat([example(100 * (1 + place)) for place in range(self.batch)])]

    @property
    def onnx(self) -> Path | None:
        """Where its ONNX file is kept, or will be; ``None`` for a file, which may change."""
        return self._folder() / "onnx" / "model.onnx" if self.name in ARCHITECTURES else None

    def _imported(self) -> Graph:
        module = _module(self.name)
        example = torch.cat([ARCHITECTURES[self.name].example_input()] * self.batch)
        graph = from_torch(module, example, name=f"{self.name}_batch{self.batch}")
        describe_weights(graph, module)
        return graph

    def _folder(self) -> Path:
        # the graph file of batch 1 changes with the architecture, its weights and how it is imported
        made_from = (FOLDER / f"{self.name}.json").read_bytes() + torch.__version__.encode()
        return (
            cache_directory() / "benchmarks" / f"{self.name}-{self.batch}-{hashlib.sha256(made_from).hexdigest()[:16]}"
        )


def _module(name: str) -> nn.Module:
    return ARCHITECTURES[name].module()


class Positional(nn.Module):
    """A module that takes its keyword arguments by position: what every runtime can be given."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.module, self.names = module, tuple(names)

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Take positional arguments first, then those that have names."""
        count = len(inputs) - len(self.names)
        return tensors_of(self.module(*inputs[:count], **dict(zip(self.names, inputs[count:], strict=True))))


@dataclass(frozen=True)
class Network:
    """A network of the sweep, at the size that it has there."""

    name: str
    batch: int = 1
    onnx: None = None

    def __str__(self) -> str:
        return self.name

    def graph(self) -> Graph:
        """Return the graph, imported."""
        return from_torch(_network(self.name), tuple(self.inputs()), name=self.name)

    def module(self) -> Callable[[], nn.Module]:
        """Return what makes the module."""
        return partial(_network, self.name)

    def inputs(self) -> list[torch.Tensor]:
        """Return the inputs."""
        _, args, kwargs = NETWORKS[self.name]()
        return [*args, *kwargs.values()]


def _network(name: str) -> nn.Module:
    module, args, kwargs = NETWORKS[name]()
    config = getattr(module, "config", None)
    if hasattr(config, "_attn_implementation"):
        config._attn_implementation = "eager"  # the only one that torch's ONNX exporter takes for all of them
    settle(module, tuple(args), kwargs)
    return Positional(module, tuple(kwargs)).eval()


def model(name: str, batch: int = 1) -> Model | Network:
    """Return the model of a name: a network of the sweep, a built-in graph or a file.

    Raises FmtpropError if another batch was asked for than the model can have.
    """
    return Network(name) if batch == 1 and name in NETWORKS and name not in ARCHITECTURES else Model(name, batch)
