"""PyTorch's names without a public path that several rooms use: operators, dispatch modes, trees."""

from torch._ops import HigherOrderOperator, OperatorBase, OpOverload, OpOverloadPacket
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

__all__ = [
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "OperatorBase",
    "TorchDispatchMode",
    "is_traceable_wrapper_subclass",
    "keystr",
    "tree_flatten",
    "tree_leaves",
    "tree_leaves_with_path",
    "tree_map",
    "tree_map_only",
    "tree_structure",
    "tree_unflatten",
    "without_modes",
]
