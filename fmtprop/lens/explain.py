"""``fp.explain_torch``: a module under the tracer, and measured in other ways to run it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fmtprop.dnnl.heap import keep_heap
from fmtprop.errors import InputError
from fmtprop.lens.findings import Lens, lens_of
from fmtprop.lens.gain import Measurement
from fmtprop.lens.tracer import Tracer
from fmtprop.lens.variants import VARIANTS, measure
from fmtprop.system.limits import MAX_RUNS


def explain_torch(
    module: torch.nn.Module, inputs: Any, *, variants: Sequence[str] = tuple(VARIANTS), repeats: int = 10
) -> Lens:
    """Return the hidden oneDNN reorders that PyTorch executes in a module, with their causes and ways to avoid them.

    The unchanged module runs in eager mode, without gradients. oneDNN's own log has its executions in each operator and
    their times.

    Parameters
    ----------
    module : torch.nn.Module
        In evaluation mode; it is not changed.
    inputs : torch.Tensor or sequence of torch.Tensor
        Its positional arguments.
    variants : sequence of {"channels_last", "mkldnn", "inductor", "fmtprop"}
        Other ways to run it, each measured in turns with eager.
    repeats : int
        Least number of turns. More follow while a gain is uncertain, for some seconds.

    Returns
    -------
    Lens
        The reorders; methods ``to_text``, ``to_json`` and ``to_dict`` render them.

    Raises
    ------
    InputError
        The object is no module, or is in training mode; an input is no tensor on the CPU; a variant is unknown.
    FmtpropError
        PyTorch has no oneDNN.

    Examples
    --------
    >>> import torch, fmtprop as fp
    >>> conv = torch.nn.Conv2d(16, 16, 3).eval()
    >>> lens = fp.explain_torch(conv, torch.ones(1, 16, 64, 64), variants=[])
    >>> lens.attributed_share
    1.0
    """
    arguments = _checked(module, inputs, variants, repeats)
    keep_heap()
    with torch.no_grad():
        for _ in range(2):  # work that is done only once is no part of a run
            module(*arguments)
        with Tracer().watching() as tracer:
            module(*arguments)
    name = type(module).__name__
    return lens_of(name, tracer.calls, in_other_ways(module, arguments, variants, repeats), name)


def in_other_ways(
    module: torch.nn.Module, arguments: Sequence[torch.Tensor], variants: Sequence[str], repeats: int
) -> tuple[Measurement, ...]:
    """Return the measured ways to run a module."""
    with torch.no_grad():
        return measure(module, arguments, variants, repeats) if variants else ()


def _checked(module: object, inputs: Any, variants: Sequence[str], repeats: int) -> list[torch.Tensor]:
    if not isinstance(module, torch.nn.Module):
        raise InputError(f"explain_torch takes a torch.nn.Module, got {type(module).__name__}")
    if module.training:
        raise InputError("explain_torch takes a module in evaluation mode: call module.eval() first")
    arguments = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    for number, tensor in enumerate(arguments):
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
            raise InputError(
                f"input {number} of explain_torch must be a tensor on the CPU, got {type(tensor).__name__}"
            )
    unknown = [name for name in variants if name not in VARIANTS]
    if unknown:
        raise InputError(f"unknown variant {unknown[0]!r} of explain_torch; known: {', '.join(VARIANTS)}")
    if not isinstance(repeats, int) or not 1 <= repeats <= MAX_RUNS:
        raise InputError(f"repeats must be a whole number from 1 to {MAX_RUNS}, got {repeats!r}")
    return arguments
