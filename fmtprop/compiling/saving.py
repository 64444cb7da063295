"""Saving: the document of a plan file has everything of a model that the file keeps. :mod:`.loading` reads it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pickle import PickleBuffer
from typing import Any

import torch

from fmtprop.compiling.findings import findings_of
from fmtprop.compiling.options import Options, Tune
from fmtprop.compiling.planned import Planned
from fmtprop.compiling.program import SharedProgram
from fmtprop.compiling.stored_program import program_row
from fmtprop.compiling.weight_files import SMALL_NBYTES, WeightFiles
from fmtprop.errors import GraphError, PlanError
from fmtprop.ir.file import reference_to
from fmtprop.ir.node import Value
from fmtprop.layout import MemoryDesc
from fmtprop.planfile.blocks import Blocks
from fmtprop.planfile.container import OURS, checksum_of, parts, write
from fmtprop.planfile.descs import Descs
from fmtprop.planfile.environment import environment
from fmtprop.planfile.rows import rows_of
from fmtprop.system.files import check_replaceable, path_of
from fmtprop.targets.bound import MovableMemory, Place
from fmtprop.targets.memory import aligned_bytes, view

#: options that are no part of a plan
_NOT_KEPT = frozenset({"progress", "stage"})


@dataclass(frozen=True)
class Saved:
    """A model to be saved."""

    #: its plans, for one shape or for several
    plans: Sequence[Planned]
    options: Options
    #: of a model for several shapes, what new plans are made of
    program: SharedProgram | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def write(self, path: str | os.PathLike[str], weights: Any = None) -> None:
        """Write a plan file; what is in the files `weights` is not written again."""
        document, blocks = self._document(None if weights is None else WeightFiles(weights))
        try:
            write(path_of(path), document, blocks)
        except OSError as error:
            raise PlanError(f"plan file {path}: cannot be written: {error.strerror}") from error

    def reduced(self, protocol: int) -> Any:
        """Return what a pickle has of the model: the bytes of a plan file, from protocol 5 on out of band.

        Raises PlanError if the model cannot be in a file.
        """
        data = bytearray().join(parts(*self._document()))
        return _unpickled, (PickleBuffer(data) if protocol >= 5 else bytes(data),)

    def _document(self, files: WeightFiles | None = None) -> tuple[dict[str, Any], list[torch.Tensor]]:
        descs, blocks = Descs(), Blocks()
        threads = {one.plan.threads for one in self.plans}
        try:
            rows = [_plan_row(one, descs, blocks) for one in self.plans]
        except GraphError as error:
            raise PlanError(f"model {self.plans[0].formatted.name} cannot be saved: {error}") from error
        document = {
            "kind": "model" if self.program is None else "shapes",
            "environment": {**environment(self.options.target), "threads": "/".join(map(str, sorted(threads)))},
            "options": options_row(self.options, descs),
            "plans": rows,
            **self.extra,
        }
        if self.program is not None:
            document["program"] = program_row(self.program, descs, blocks)
        checksums = [checksum_of(block) for block in blocks.padded]
        if files is not None:
            document["weights"] = _referring(files, descs, blocks)
            checksums += [checksum_of(block) for block in blocks.padded[len(checksums) :]]
        document |= {"descs": descs.rows, "checksums": checksums}
        return document, blocks.padded


def _unpickled(data: Any) -> Any:
    """Return the model of a pickle."""
    import fmtprop

    return fmtprop.load_plan(data)


def check_destination(path: str | os.PathLike[str]) -> None:
    """Check that a plan file can be written, before the model is compiled."""
    try:
        check_replaceable(path_of(path), OURS)
    except OSError as error:
        raise PlanError(f"plan file {path}: cannot be written: {error.strerror}") from error


def _plan_row(one: Planned, descs: Descs, blocks: Blocks) -> dict[str, Any]:
    graph = one.formatted
    return {
        "name": graph.name,
        "structure": graph.structure,
        "nodes": rows_of(graph, descs),
        "forms": _forms(one, descs, blocks),
        "precision": one.precision,
        "checked": one.options.verify != "off",
        "choices": {"rewrite": one.rewrite, "alike": one.is_like_another_shape},
        "report": findings_of(one),
    }


def _forms(one: Planned, descs: Descs, blocks: Blocks) -> list[list[Any]]:
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
            rows[key] = blocks.place(flat, bytes_, key[1])
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
    return (origin, desc), _laid_out(Place(MovableMemory(flat), desc).tensor(), desc)


def _source_of(one: Planned, origin: Value) -> torch.Tensor | None:
    return one.weights.find(origin, one.formatted.desc_of(origin))


def _laid_out(tensor: torch.Tensor, desc: MemoryDesc) -> torch.Tensor:
    flat = aligned_bytes(desc.nbytes).zero_()
    view(flat, desc).copy_(tensor)
    return flat


def _referring(files: WeightFiles, descs: Descs, blocks: Blocks) -> dict[str, Any]:
    """Leave out the blocks that can be made of the bytes of files, and return how."""
    rows = []
    for block, desc in blocks.formats.items():
        found = files.find(blocks.padded[block], desc)
        if found is None:
            continue
        where, recipe, factors = found
        scale = None if factors is None else blocks.place(factors, factors.view(torch.uint8))
        how = [recipe.dtype.value, list(recipe.order), descs.place(desc), recipe.axis, scale]
        rows.append([block, where.file, where.offset, *how])
        blocks.padded[block] = blocks.padded[block][:0]
    if not rows:
        raise PlanError(
            f"none of the model's weights of {SMALL_NBYTES} bytes or more are in {files.given}: give the file that "
            "they came from, or save without naming one"
        )
    numbers = files.used()
    for row in rows:
        row[1] = numbers.index(row[1])
    return {"files": files.rows(), "blocks": rows}


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
