"""Words for a failed export: the module that raised the error, and a change of it that helps."""

from __future__ import annotations

import traceback

from torch import nn

from fmtprop.errors import IN_PLACE_REMEDY
from fmtprop.ops.pytorch import DynamicOutputShapeException


def depends_on_data(error: Exception) -> bool:
    """Return whether an export failed at a branch or a size that depends on a tensor's values."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, PendingUnbackedSymbolNotFound

    return isinstance(error, GuardOnDataDependentSymNode | PendingUnbackedSymbolNotFound)


def export_failure(module: nn.Module, error: Exception) -> str:
    """Return the message about a module that torch.export refused, with the place and a remedy."""
    if depends_on_data(error):
        return (
            f"torch.export cannot export {type(module).__name__}: {_running(module, error)} takes a branch or a size "
            "from a tensor's values, and a graph runs every op once: compute both sides and choose with torch.where "
            "(torch.export.draft_export lists every obstacle)"
        )
    where = _running(module, error)
    if isinstance(error, DynamicOutputShapeException):
        return (
            f"torch.export cannot export {type(module).__name__}: the shapes of {error.func}'s results are known only "
            f"from numbers (PyTorch has no rule for these), in {where}; call it outside of the module, or compile by "
            'torch.compile(model, backend="fmtprop"), which leaves it to PyTorch'
        )
    failure = f"torch.export cannot export {type(module).__name__}: {first_lines(error)}\n  in {where}\n"
    if any(phrase in str(error) for phrase in ("not a known type", "Unsupported input type")):
        return (
            f"{failure}Take and return tensors, numbers, tuples, lists and dicts (a model of transformers: "
            "kwargs={'use_cache': False}), or register the class with torch.export.register_dataclass. If it is a "
            f"cache that the model updates, {IN_PLACE_REMEDY}"
        )
    return (
        f"{failure}"
        "Check that module(*example_inputs, **kwargs) runs and that no branch depends on tensor values "
        "(torch.export.draft_export lists every obstacle)"
    )


def _running(module: nn.Module, error: Exception) -> str:
    """Return the path of the module that raised an error, with its line of source."""
    names = {id(child): name or type(child).__name__ for name, child in module.named_modules()}
    found = type(module).__name__
    for frame, line in traceback.walk_tb(error.__traceback__):
        child = frame.f_locals.get((*frame.f_code.co_varnames, "self")[0])
        is_users = not frame.f_globals.get("__name__", "").startswith(("torch.", "fmtprop.capture."))
        if isinstance(child, nn.Module) and id(child) in names and is_users:
            found = f"{names[id(child)]} ({frame.f_code.co_filename}:{line})"
    return found


def first_lines(error: Exception) -> str:
    """Return the class and the first lines of PyTorch's error, which may be long."""
    lines = [line for line in str(error).splitlines() if line.strip()][:6]
    return "\n  ".join([type(error).__name__, *lines])
