"""The document of a plan file: everything of planned models that the file keeps. :mod:`.loading` reads it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import torch

from fmtprop.compiling.options import Options, Tune
from fmtprop.compiling.planned import Planned
from fmtprop.errors import GraphError, PlanError
from fmtprop.ir.file import reference_to, spell_floats
from fmtprop.ir.node import Value
from fmtprop.layout import MemoryDesc
from fmtprop.planfile.container import OURS, checksum_of, padded, parts, write
from fmtprop.planfile.descs import Descs
from fmtprop.planfile.environment import environment
from fmtprop.planfile.rows import rows_of
from fmtprop.system.files import check_replaceable, path_of
from fmtprop.targets.bound import Memory, Place
from fmtprop.targets.memory import aligned_bytes, view

#: options that are no part of a plan
_NOT_KEPT = frozenset({"progress", "stage"})


def save(plans: Sequence[Planned], options: Options, extra: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a plan file; see :func:`document_of`.

    Raises
    ------
    PlanError
        The model cannot be in a file, or the file cannot be written.
    """
    document, blocks = document_of(plans, options, extra)
    try:
        write(path_of(path), document, blocks)
    except OSError as error:
        raise PlanError(f"plan file {path}: cannot be written: {error.strerror}") from error


def check_destination(path: str | os.PathLike[str]) -> None:
    """Check that a plan file can be written, before the model is compiled.

    Raises
    ------
    PlanError
        The file system refuses, or another program's file has that name.
    """
    try:
        check_replaceable(path_of(path), OURS)
    except OSError as error:
        raise PlanError(f"plan file {path}: cannot be written: {error.strerror}") from error


def saved(plans: Sequence[Planned], options: Options, extra: Mapping[str, Any]) -> bytearray:
    """Return the bytes of a plan file; see :func:`document_of`."""
    return bytearray().join(parts(*document_of(plans, options, extra)))


def document_of(plans: Sequence[Planned], options: Options, extra: Mapping[str, Any]) -> tuple[Any, list[torch.Tensor]]:
    """Return the document of a plan file, and its blocks of packed weights.

    Parameters
    ----------
    plans : sequence of Planned
        The plans of one model, for one shape or for several.

    Raises
    ------
    PlanError
        Something of the model cannot be in a file.
    """
    descs, blocks = Descs(), _Blocks()
    try:
        rows = [_plan_row(one, descs, blocks) for one in plans]
    except GraphError as error:
        raise PlanError(f"model {plans[0].formatted.name} cannot be saved: {error}") from error
    document = {
        "environment": {**environment(options.target), "threads": str(plans[0].plan.threads)},
        "options": options_row(options, descs),
        "plans": rows,
        "descs": descs.rows,
        "checksums": [checksum_of(block) for block in blocks.padded],
        **extra,
    }
    return document, blocks.padded


def _plan_row(one: Planned, descs: Descs, blocks: _Blocks) -> dict[str, Any]:
    graph = one.formatted
    return {
        "name": graph.name,
        "structure": graph.structure,
        "nodes": rows_of(graph, descs),
        "forms": _forms(one, descs, blocks),
        "precision": one.precision,
        "checked": one.options.verify != "off",
        "report": {
            "certificate": None if one.certificate is None else spell_floats(asdict(one.certificate)),
            "race": None if one.race is None else spell_floats(asdict(one.race)),
            "tuning": None if one.tuning is None else spell_floats(asdict(one.tuning)),
            "dropped": dict(one.dropped),
            "left_out": dict(one.left_out),
            "seconds": dict(one.seconds),
        },
    }


class _Blocks:
    """The blocks of a file; weights that several plans share are one."""

    def __init__(self) -> None:
        self.padded: list[torch.Tensor] = []
        self._places: dict[int, int] = {}
        self._owners: list[torch.Tensor] = []  # ids are of objects that live

    def place(self, flat: torch.Tensor, bytes_: torch.Tensor) -> int:
        """Return the place of some bytes, which are those of a plan's constant."""
        if id(flat) not in self._places:
            self._places[id(flat)] = len(self.padded)
            self._owners.append(flat)
            self.padded.append(padded(bytes_))
        return self._places[id(flat)]


def _forms(one: Planned, descs: Descs, blocks: _Blocks) -> list[list[Any]]:
    """Return where the bytes of each packed form are: origin, format, block."""
    plan, graph = one.plan, one.formatted
    wanted = {id(flat) for flat in plan.constants}
    hidden, rows = set(wanted), dict[tuple[Value, MemoryDesc], int]()
    for origin, desc, flat in one.weights.items():
        if id(flat) not in wanted and not one.weights.is_kept(flat):
            continue
        form = _storable(one, origin, desc, flat)
        if form is not None:
            key, bytes_ = form
            rows[key] = blocks.place(flat, bytes_)
        if form is not None or _source_of(one, origin) is not None:  # of one that cannot be stored, the source is
            hidden.discard(id(flat))
    if hidden:
        raise PlanError(f"model {graph.name} cannot be saved: PyTorch hides the numbers of {len(hidden)} constants")
    return [[reference_to(origin), descs.place(desc), block] for (origin, desc), block in rows.items()]


def _storable(
    one: Planned, origin: Value, desc: MemoryDesc, flat: torch.Tensor
) -> tuple[tuple[Value, MemoryDesc], torch.Tensor] | None:
    """Return a form whose bytes mean the same in every process, and the bytes; None if its source is one."""
    if flat.is_mkldnn:
        source = one.formatted.desc_of(origin)
        if _source_of(one, origin) is not None or not source.is_dense or source.dtype is not desc.dtype:
            return None
        return (origin, source), _laid_out(flat.to_dense(), source)
    if not desc.takes_any_bytes:
        return None
    if flat.dtype is torch.uint8 and flat.dim() == 1:
        return (origin, desc), flat
    # a tensor that an operator of PyTorch made
    return (origin, desc), _laid_out(Place(Memory(flat), desc).tensor(), desc)


def _source_of(one: Planned, origin: Value) -> torch.Tensor | None:
    return one.weights.find(origin, one.formatted.desc_of(origin))


def _laid_out(tensor: torch.Tensor, desc: MemoryDesc) -> torch.Tensor:
    flat = aligned_bytes(desc.nbytes).zero_()
    view(flat, desc).copy_(tensor)
    return flat


def options_row(options: Options, descs: Descs) -> dict[str, Any]:
    """Return options as plain data."""
    row = {one.name: getattr(options, one.name) for one in fields(Options) if one.name not in _NOT_KEPT}
    tune = options.tune
    row["tune"] = [tune.costs, tune.effort] if isinstance(tune, Tune) else tune
    for key in ("boundary", "pin"):
        row[key] = {
            name: descs.place(desc) if isinstance(desc, MemoryDesc) else desc for name, desc in row[key].items()
        }
    return row
