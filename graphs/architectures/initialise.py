"""Seeded weights for the built-in architectures.

Every entry of a module's state dict is described by an :class:`~fmtprop.ir.initialiser.Initialiser`, chosen from its
name, its shape and its owner alone, so that a graph file ships descriptions instead of weights. The distributions
keep activations in range through any depth without looking at data: weights are scaled by their fan-in for unit
variance out, and the running statistics of batch normalization scatter around those of such a signal, so that they
are neither trivial nor wrong. A root module may correct single tensors in ``init_scales``, a class attribute that
maps name patterns to factors, for what cannot be seen locally (the last norm of a residual branch, say).

Knows no particular architecture.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from fmtprop.errors import GraphError
from fmtprop.ir.initialiser import Initialiser

__all__ = ["apply", "fan_in", "initialiser_of"]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_NORMS = (*_BATCH_NORMS, nn.LayerNorm, nn.GroupNorm)


def initialiser_of(name: str, tensor: torch.Tensor, module: nn.Module) -> dict[str, Any]:
    """Choose the initialiser of one entry of a module's state dict.

    `name`: key in ``module.state_dict()``; seeds the stream and is matched against ``init_scales``. `tensor`: the
    entry; only its shape is read, so it may be on the meta device.

    >>> conv = nn.Sequential(nn.Conv2d(8, 4, 1))
    >>> initialiser_of("0.weight", conv[0].weight, conv)
    {'kind': 'normal', 'seed': 3378657847, 'mean': 0.0, 'std': 0.5}
    """
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    scale = _scale_of(name, module)
    seed = zlib.crc32(name.encode())
    if leaf == "num_batches_tracked":
        return Initialiser.constant(0.0).to_json()
    if isinstance(owner, _BATCH_NORMS) and leaf == "running_mean":
        return Initialiser.normal(seed, 0.0, 0.05 * scale).to_json()
    if isinstance(owner, _BATCH_NORMS) and leaf == "running_var":
        return Initialiser.uniform(seed, 0.7 * scale, 1.3 * scale).to_json()
    if leaf == "layer_scale" or (isinstance(owner, _NORMS) and leaf == "weight"):
        return Initialiser.uniform(seed, 0.8 * scale, 1.2 * scale).to_json()
    if leaf == "bias":
        return Initialiser.normal(seed, 0.0, 0.05 * scale).to_json()
    if isinstance(owner, nn.Embedding) or leaf in ("class_token", "position_embedding"):
        return Initialiser.normal(seed, 0.0, scale).to_json()
    if isinstance(owner, (*_CONVOLUTIONS, *_TRANSPOSED, nn.Linear)) and leaf == "weight":
        # Gain 2 makes up for the half of the energy that a ReLU before the layer removes.
        return Initialiser.normal(seed, 0.0, scale * math.sqrt(2.0 / fan_in(owner))).to_json()
    raise GraphError(
        f"{name} ({type(owner).__name__}, shape {tuple(tensor.shape)}): no initialiser rule for this tensor; "
        "add one to graphs/architectures/initialise.py"
    )


def fan_in(layer: nn.Module) -> float:
    """Count the products that are summed into one output element of a layer.

    Result: fractional where a transposed convolution's stride does not divide its kernel (then it is the mean).

    >>> fan_in(nn.Conv2d(8, 8, 3, groups=4)), fan_in(nn.ConvTranspose2d(8, 4, 2, stride=2))
    (18.0, 8.0)
    """
    if isinstance(layer, _TRANSPOSED):
        return layer.in_channels / layer.groups * math.prod(layer.kernel_size) / math.prod(layer.stride)
    return float(math.prod(layer.get_parameter("weight").shape[1:]))


def _scale_of(name: str, module: nn.Module) -> float:
    scales: Mapping[str, float] = getattr(module, "init_scales", {})
    return math.prod(factor for pattern, factor in scales.items() if fnmatchcase(name, pattern))


def apply(module: nn.Module) -> nn.Module:
    """Fill every parameter and buffer of a module from its initialiser.

    `module`: the root module, its tensors on the CPU; changed in place. Raises GraphError if a tensor has no
    initialiser rule.
    """
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            initialiser = Initialiser.from_json(initialiser_of(name, tensor, module))
            dtype = torch.empty((), dtype=tensor.dtype).numpy().dtype
            tensor.copy_(torch.from_numpy(initialiser.materialise(tuple(tensor.shape), dtype)))
    return module
