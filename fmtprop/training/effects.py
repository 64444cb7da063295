"""Linear algebra as parts of a graph: its checks, and LU factorizations.

PyTorch traces a check as a call with an effect, which no plan expresses. It factorizes a matrix or its transpose, by
the strides of the matrix, and the gradient reads the strides again; a plan has formats of its own, so the call keeps
the choice.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fmtprop.training.pytorch import check_errors, factorizations, with_effects


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


_BY_COLUMNS = {function: _by_columns(function) for function in factorizations}


def join_checks(program: fx.GraphModule) -> int:
    """Make each check of linear algebra a call that returns the checked result.

    Result: number of tokens: first arguments and first results, which kept the checks in order.
    """
    effects = [node for node in program.graph.nodes if node.target is with_effects]
    checks = [node for node in effects if node.args[1] is check_errors]
    if len(checks) < len(effects):
        return 0  # the importer refuses effects
    tokens = set()
    for node in checks:
        token, _, status, *how = node.args
        tokens.add(token)
        source = status.args[0]
        result = next(user for user in source.users if user.target is operator.getitem and user.args[1] == 0)
        # the results of a call stand together, before their uses
        order = list(program.graph.nodes)
        with program.graph.inserting_after(max(result, status, key=order.index)):
            checked = program.graph.call_function(_checked._opoverload, (result, status, *how), node.kwargs)
        checked.meta = dict(result.meta)
        result.replace_all_uses_with(checked, delete_user_cb=lambda user, own=checked: user is not own)
        for user in list(node.users):
            user.replace_all_uses_with(token)
            program.graph.erase_node(user)
        program.graph.erase_node(node)
    program.recompile()
    return len(tokens)


def without_tokens(program: fx.GraphModule, count: int) -> None:
    """Remove its first arguments from a program, which are tokens, and its first results, the same tokens."""
    *nodes, output = program.graph.nodes
    output.args = (output.args[0][count:],)
    for token in nodes[:count]:
        program.graph.erase_node(token)
    program.recompile()


@torch.library.custom_op("fmtprop::linalg_checked", mutates_args=())
def _checked(result: torch.Tensor, status: torch.Tensor, name: str, *, is_matrix: bool) -> torch.Tensor:
    """Return the result of a call of linear algebra if its status is good."""
    check_errors(status, name, is_matrix=is_matrix)
    return result.clone()


@_checked.register_fake
def _(result: torch.Tensor, status: torch.Tensor, name: str, *, is_matrix: bool) -> torch.Tensor:
    return torch.empty_like(result)
