"""One plan as a server sees it: names, types and sizes of its tensors, what a run costs, and the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TypeAlias

import torch

from fmtprop.compiling.compiled import CompiledModel
from fmtprop.compiling.dynamic import DynamicModel
from fmtprop.compiling.loading import load_plan
from fmtprop.errors import InputError
from fmtprop.ir.tensors import torch_dtype

#: how the files in a folder end that are plans
SUFFIX = ".fmtplan"


@dataclass(frozen=True)
class Spec:
    """An input or a result.

    Parameters
    ----------
    name : str
        Its name.
    dtype : torch.dtype
        Its data type.
    dims : tuple of int
        Its sizes; -1 where several are possible.
    """

    name: str
    dtype: torch.dtype
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Engine:
    """A model for one shape, ready to run.

    Parameters
    ----------
    inputs, outputs : tuple of Spec
        Its inputs and results.
    run : callable
        Takes and returns a list of tensors, in the order of ``inputs`` and ``outputs``.
    seconds : float
        What a run costs, beside other shapes of the model; 0 if nothing is known.
    name : str
        The model's.
    """

    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    run: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
    seconds: float = 0.0
    name: str = "model"

    @classmethod
    def of(cls, net: CompiledModel) -> Engine:
        """Return the engine of a compiled model."""
        return cls(
            tuple(Spec(name, torch_dtype(desc.dtype), desc.dims) for name, desc, _ in net.plan.inputs),
            tuple(Spec(name, torch_dtype(out.desc.dtype), out.desc.dims) for name, out in net.plan.outputs),
            net.run_flat,
            0.0 if net.certificate is None else net.certificate.objective,
            net.graph.name,
        )


#: a plan file, a folder of them, the bytes of one, a model, or several of these: the plans of one model
Source: TypeAlias = str | PathLike[str] | bytes | CompiledModel | DynamicModel | Engine | Sequence["Source"]


def engines_of(source: Source) -> list[Engine]:
    """Return the engines of a model.

    `source`: plan files, folders of them, their bytes, compiled models: one for each shape. Raises PlanError if a plan
    cannot be loaded.
    """
    if isinstance(source, Engine):
        return [source]
    if isinstance(source, CompiledModel):
        return [Engine.of(source)]
    if isinstance(source, DynamicModel):
        return [Engine.of(net) for net in source.plans]
    if isinstance(source, str | PathLike) and Path(source).is_dir():
        found = sorted(Path(source).glob(f"*{SUFFIX}"))
        if not found:
            raise InputError(f"folder {source} has no file *{SUFFIX}: write one with fmtprop compile MODEL -o FILE")
        return engines_of(found)
    if isinstance(source, Sequence) and not isinstance(source, str | bytes):
        return [engine for one in source for engine in engines_of(one)]
    return engines_of(load_plan(source))
