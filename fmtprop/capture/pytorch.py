"""PyTorch's names without a public path that capturing a program takes.

What imports sympy is in functions: an import of :mod:`fmtprop.capture` would take a third of a second longer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses import FakeTensor
from torch.export import ExportedProgram
from torch.fx.experimental import _config
from torch.fx.graph_module import _loader

#: the package with PyTorch's functions that call functions of the user's
FUNCTORCH = torch._functorch.__name__

#: the call that makes a Python number of a tensor
to_number = torch.ops.aten._local_scalar_dense.default

#: name -> source of all modules that were made of graphs, for tracebacks
sources: dict[str, Any] = _loader.eval_cache


#: where an overload has rules for tracing it as parts
_TRACED_AS_PARTS = (torch.DispatchKey.Autograd, torch.DispatchKey.CompositeImplicitAutograd)


def with_rule(function: Any, make: Callable[[Callable[..., Any]], Callable[..., Any]] | None) -> Callable[[], None]:
    """Replace an overload's rules for tracing it as parts, by others or none; return a function that restores them."""
    taken = {key: function.py_kernels.pop(key) for key in _TRACED_AS_PARTS if key in function.py_kernels}
    if make is not None:
        function.py_kernels |= {key: make(rule) for key, rule in taken.items()}
    function._dispatch_cache.clear()

    def give_back() -> None:
        function.py_kernels.update(taken)
        function._dispatch_cache.clear()

    return give_back


def sizes_of_one(are_sizes: bool) -> AbstractContextManager[None]:
    """Let the exporter treat sizes of 0 and 1 as any others, or not."""
    made: AbstractContextManager[None] = _config.patch(backed_size_oblivious=are_sizes)  # type: ignore[attr-defined]
    return made


def names_of_exporter() -> dict[str, Any]:
    """Return the global names of PyTorch's exporter, to change."""
    from torch.export import _trace

    return vars(_trace)


def names_of_operators() -> dict[str, Any]:
    """Return the global names of PyTorch's tables of operators by device, to change."""
    from torch._export import utils

    return vars(utils)


def serialized(program: ExportedProgram) -> bytes:
    """Return PyTorch's JSON of a program."""
    from torch._export.serde import serialize

    return serialize.serialize(program).exported_program


def deserialized(text: bytes, state: dict[str, torch.Tensor], constants: dict[str, torch.Tensor]) -> ExportedProgram:
    """Return the program of PyTorch's JSON."""
    from torch._export.serde import serialize

    artifact = serialize.SerializedArtifact(text, state, constants, {})  # type: ignore[arg-type]
    return serialize.deserialize(artifact)


def functions_of_sizes() -> dict[str, type]:
    """Return PyTorch's classes of functions in expressions of sizes, by name."""
    from torch.utils._sympy import functions

    return {key: value for key, value in vars(functions).items() if isinstance(value, type)}


def guard_of(relation: Any) -> Any:
    """Return PyTorch's entry of a relation of sizes that decided a branch."""
    from torch._guards import ShapeGuard, SLoc

    return ShapeGuard(relation, SLoc(None, None), False)
