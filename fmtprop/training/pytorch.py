"""PyTorch's names without a public path that training takes, of its capture and of its autograd."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch._C import _get_mkldnn_enabled as is_mkldnn_enabled
from torch._C import _set_mkldnn_enabled as enable_mkldnn
from torch._C._dynamo import eval_frame
from torch._decomp import decompositions
from torch._dynamo import config
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    TorchDynamoException,
    TorchRuntimeError,
    Unsupported,
    UserError,
)
from torch._dynamo.external_utils import wrap_inline
from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._guards import TracingContext
from torch._higher_order_ops.effects import with_effects
from torch._prims_common import suggest_memory_format
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
from torch.nn.modules.dropout import _DropoutNd as AnyDropout

#: whether a graph of autograd is kept for another walk: of the walk that runs now
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph

# the caller's hooks for saved tensors: the last pair, its removal, and another pair
top_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
pop_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks
push_hooks: Callable[..., None] = torch._C._autograd._push_saved_tensors_default_hooks

#: calls of linear algebra that factorize a matrix, by rows or by columns
factorizations = (
    torch.ops.aten._linalg_det.default,
    torch.ops.aten._linalg_slogdet.default,
    torch.ops.aten._linalg_solve_ex.default,
)

#: the check of their result
check_errors = torch.ops.aten._linalg_check_errors.default

#: whether PyTorch can forget that it skips a function; its older versions cannot
CAN_ALLOW = hasattr(eval_frame, "set_code_exec_strategy")


def allow_capture(code: CodeType) -> None:
    """Let PyTorch capture a function of this code again."""
    usual = eval_frame._FrameAction.DEFAULT
    eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(usual, usual))


def rule_of_recurrent_layers() -> Callable[..., Any]:
    """Return PyTorch's function that traces recurrent layers."""
    rule: Callable[..., Any] = decompositions._rnn_helper
    return rule


def set_rule_of_recurrent_layers(rule: Callable[..., Any]) -> None:
    """Trace recurrent layers by another function."""
    decompositions._rnn_helper = rule


def size_of_image(size: Any, sizes: Any, factors: Any) -> Any:
    """Return the size of a resampled image, from its size or its factors."""
    return decompositions.upsample_compute_output_size(size, sizes, factors)  # type: ignore[no-untyped-call]
