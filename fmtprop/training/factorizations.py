"""LU factorizations: PyTorch factorizes a matrix or its transpose, by the strides of the matrix.

The gradient reads the strides again, when it is traced; a plan has formats of its own. Owns the calls with the traced
choice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def keep_factorized_side(program: fx.GraphModule) -> None:
    """Make calls that factorize a matrix that is not row-major do so in a plan, too; plans give row-major matrices."""
    for node in program.graph.nodes:
        if node.target in _BY_COLUMNS and not node.args[0].meta["val"].is_contiguous():
            node.target = _BY_COLUMNS[node.target]
    program.recompile()


def _by_columns(function: Any) -> Any:
    """Return the overload that makes a call on the column-major form of its first operand."""
    name, schema = function._schema.name.removeprefix("aten::_"), str(function._schema)

    def call(matrix: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return function(matrix.mT.contiguous().mT, *args, **kwargs)

    made = torch.library.custom_op(f"fmtprop::{name}", call, mutates_args=(), schema=schema[schema.index("(") :])
    made.register_fake(call)
    return made._opoverload


_BY_COLUMNS = {
    function: _by_columns(function)
    for function in (
        torch.ops.aten._linalg_det.default,
        torch.ops.aten._linalg_slogdet.default,
        torch.ops.aten._linalg_solve_ex.default,
    )
}
