"""PyTorch's names without a public path that running a plan takes, and those that several rooms need.

In each room, the file of this name is the only one with private names of PyTorch: a new PyTorch without one fails in
``tests/meta/test_private_names.py``, by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import _AutoDispatchBelowAutograd as below_autograd
from torch._C import _dispatch_has_kernel as has_kernel
from torch._C import _dispatch_has_kernel_for_dispatch_key as has_kernel_for
from torch._C import _dispatch_tls_is_dispatch_key_included as is_key_included
from torch._C import _get_dispatch_mode as dispatch_mode
from torch._C import _get_tracing_state as tracing_state
from torch._C import _is_alias_of as is_alias  # type: ignore[attr-defined]
from torch._C import _is_any_autocast_enabled as is_any_autocast_enabled
from torch._C import _len_torch_dispatch_stack as count_modes
from torch._C import _set_grad_enabled as set_grad_enabled
from torch._C._dynamo import guards
from torch._C._dynamo.guards import TensorGuards
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import HigherOrderOperator, OperatorBase, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_leaves,
    tree_leaves_with_path,
    tree_map,
    tree_map_only,
    tree_structure,
    tree_unflatten,
)

#: the key of make_fx's mode, and the mode of a key under pre-dispatch, which is one of the process
PROXY = torch._C._TorchDispatchModeKey.PROXY
dispatch_mode_before: Callable[[Any], Any] = torch._ops._get_dispatch_mode_pre_dispatch

#: the allocator of a dense tensor on the CPU, for any default device of the caller, in half of the dispatcher's time
empty_strided: Callable[..., torch.Tensor] = guards._empty_strided_cpu  # type: ignore[attr-defined]

#: PyTorch's generated bindings
BINDINGS: tuple[Any, ...] = (
    torch._C._VariableFunctions,
    torch._C._fft,  # type: ignore[attr-defined]
    torch._C._linalg,  # type: ignore[attr-defined]
    torch._C._special,  # type: ignore[attr-defined]
    torch._C._nn,
)

# functions that write their result to a tensor, behind the ones of torch.nn.functional
elu = torch._C._nn.elu
hardsigmoid = torch._C._nn.hardsigmoid
hardswish = torch._C._nn.hardswish
leaky_relu = torch._C._nn.leaky_relu
mish = torch._C._nn.mish
prelu_kernel = torch._prelu_kernel
prelu_overload = torch.ops.aten._prelu_kernel.default
prelu_kernel_backward = torch.ops.aten._prelu_kernel_backward

# ---------------------------------------------------------------- mkldnn tensors

#: operators without which no mkldnn tensor can be read
READING = ("_get_mkldnn_serialized_md", "_nbytes", "data_ptr")


def nbytes_of_blocks(tensor: torch.Tensor) -> int:
    """Return the bytes of an mkldnn tensor's numbers."""
    return int(torch.ops.mkldnn._nbytes(tensor))


def serialized_format(tensor: torch.Tensor) -> bytes:
    """Return oneDNN's own memory descriptor of an mkldnn tensor."""
    return bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(tensor).numpy().tobytes())


def packed_for_convolution(weights: torch.Tensor, *how: Any) -> torch.Tensor:
    """Return the mkldnn tensor of weights that a convolution prefers."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_convolution_weight.default(weights, *how)
    return packed


def packed_for_deconvolution(weights: torch.Tensor, *how: Any) -> torch.Tensor:
    """Return the mkldnn tensor of weights that a deconvolution prefers."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_convolution_transpose_weight.default(weights, *how)
    return packed


def packed_for_linear(weights: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the mkldnn tensor of weights that an inner product of so many rows prefers."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight.default(weights, rows)
    return packed


def convolve(src: torch.Tensor, weights: torch.Tensor, *how: Any) -> None:
    """Convolve, and apply an element-wise function."""
    torch.ops.mkldnn._convolution_pointwise.default(src, weights, *how)


def convolve_and_add(src: torch.Tensor, other: torch.Tensor, weights: torch.Tensor, *how: Any) -> None:
    """Convolve, add another tensor, and apply an element-wise function."""
    torch.ops.mkldnn._convolution_pointwise.binary(src, other, weights, *how)


def computes_in_bf16() -> bool:
    """Return whether PyTorch's oneDNN computes in bf16 on this CPU."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def computes_in_f16() -> bool:
    """Return whether PyTorch's oneDNN computes in f16 on this CPU."""
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
