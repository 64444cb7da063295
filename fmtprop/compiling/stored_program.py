"""The program of a model for several shapes in a plan file: its text, and where the numbers of its tensors are.

A tensor that a plan packs as it is has its numbers in that packed form alone; others, such as those that were folded
into other weights, have a block of their own. A reader opens the program when it meets a shape without a plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fmtprop.capture.program_text import program_of, text_of
from fmtprop.capture.torch_export import Exported
from fmtprop.compiling.inputs import examples_of
from fmtprop.compiling.planned import Planned
from fmtprop.compiling.program import SharedProgram
from fmtprop.errors import FmtpropError, PlanError
from fmtprop.ir.graph import Graph
from fmtprop.ir.tensors import data_type
from fmtprop.layout import MemoryDesc
from fmtprop.planfile.blocks import Blocks
from fmtprop.planfile.descs import Descs, at
from fmtprop.runtime.weights import SharedForms, dense
from fmtprop.targets.memory import aligned_bytes, view, view_of_tensor

#: what a tensor may be in a program
_PARAMETER, _BUFFER, _CONSTANT = "parameter", "buffer", "constant"

_KEYS = {"text": list, "relations": list, "names": dict, "tensors": list, "forms": list}


# ---------------------------------------------------------------- writing


def program_row(program: SharedProgram, descs: Descs, blocks: Blocks) -> dict[str, Any]:
    """Return a program as plain data: numbers that its plans have in the file are not written again."""
    exported = program.exported
    try:
        text, relations = text_of(exported)
    except FmtpropError as error:
        raise PlanError(
            f"model {exported.name} cannot be saved with the program that plans for other shapes need: {error}. Save "
            "the model of each shape: net.plan_for(...).save(path)"
        ) from error
    state, constants = exported.program.state_dict, exported.program.constants
    tensors: dict[object, torch.Tensor] = {}
    names: dict[str, list[Any]] = {}
    for name, tensor in {**state, **constants}.items():
        kind = _PARAMETER if isinstance(tensor, torch.nn.Parameter) else _BUFFER if name in state else _CONSTANT
        key = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        tensors.setdefault(key, tensor.detach())
        names[name] = [kind, list(tensors).index(key)]
    rows, forms = [], []
    for place, tensor in enumerate(tensors.values()):
        own = _desc_of(tensor)
        packed = program.shapes.forms.parts(tensor)
        known = [(part, desc, block) for part, desc, flat in packed if (block := blocks.known(flat)) is not None]
        if tensor.numel() and not any(_covers(part, own) for part, _, _ in known):
            known.append((own, own, blocks.place(tensor, _bytes_of(tensor, own), own)))
        rows.append(descs.place(own))
        forms += [[place, descs.place(part), descs.place(desc), block] for part, desc, block in known]
    written = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return {
        "text": [blocks.place(written, written), len(text)],
        "relations": relations,
        "names": names,
        "tensors": rows,
        "forms": forms,
    }


def _desc_of(tensor: torch.Tensor) -> MemoryDesc:
    """Return how a tensor's numbers lie in a file: with its own strides, if these leave no gaps."""
    dtype = data_type(tensor.dtype)
    own = MemoryDesc.view(tuple(tensor.shape), dtype, strides=tensor.stride())
    return own if own.is_packed and own.is_regular else MemoryDesc(tuple(tensor.shape), dtype)


def _bytes_of(tensor: torch.Tensor, desc: MemoryDesc) -> torch.Tensor:
    flat = aligned_bytes(desc.nbytes)
    view(flat, desc).copy_(tensor)
    return flat


def _covers(part: MemoryDesc, whole: MemoryDesc) -> bool:
    """Return whether a view of a tensor has all of its numbers, each once."""
    return part.is_packed and part.is_regular and whole.is_packed and part.nbytes == whole.nbytes


# ---------------------------------------------------------------- reading


class StoredProgram:
    """A program in a plan file, of which nothing is trusted.

    `graph`: the formatted graph of a plan in the file. `plans`: the plans of the file, if they fit.
    """

    def __init__(
        self,
        row: Any,
        descs: Sequence[MemoryDesc],
        blocks: Sequence[torch.Tensor],
        graph: Graph,
        plans: Sequence[Planned],
    ) -> None:
        if not isinstance(row, dict) or {key: type(row.get(key)) for key in _KEYS} != _KEYS or len(row["text"]) != 2:
            raise PlanError(f"its program must have the keys {', '.join(_KEYS)}")
        self._row, self._descs, self._blocks, self._graph, self._plans = row, descs, blocks, graph, plans

    def open(self) -> SharedProgram:
        """Return the program; its plans' packed weights and choices serve other shapes."""
        try:
            tensors = self._tensors()
            return self._program(tensors)
        except (TypeError, ValueError, RuntimeError) as error:
            raise PlanError(f"its program is malformed: {str(error).splitlines()[0]}") from error

    def _program(self, tensors: Sequence[torch.Tensor]) -> SharedProgram:
        row = self._row
        block, nbytes = at(self._blocks, row["text"][0], "block"), row["text"][1]
        text = block[:nbytes].numpy().tobytes()
        state: dict[str, torch.Tensor] = {}
        constants: dict[str, torch.Tensor] = {}
        for name, (kind, place) in row["names"].items():
            tensor = at(tensors, place, "tensor")
            owner = constants if kind == _CONSTANT else state
            owner[name] = torch.nn.Parameter(tensor, requires_grad=False) if kind == _PARAMETER else tensor
        program = program_of(text, row["relations"], state, constants)
        graph = self._graph
        made = SharedProgram(Exported(program, graph.name, None, examples_of(graph), structure=graph.structure))
        self._note(tensors, made.shapes.forms)
        for plan in [one for one in self._plans if not one.is_like_another_shape] or self._plans:
            made.shapes.note_choices(plan.formatted, plan.rewrite)
        return made

    def _tensors(self) -> list[torch.Tensor]:
        """Return the tensors, read from the blocks that have all of their numbers."""
        descs = [at(self._descs, place, "format") for place in self._row["tensors"]]
        found: dict[int, torch.Tensor] = {}
        for place, part, desc, flat in self._forms():
            whole = at(descs, place, "tensor")
            if place in found or not _covers(part, whole) or part.dtype is not whole.dtype or not whole.is_plain:
                continue
            if part == whole == desc:
                found[place] = view(flat, whole)
                continue
            bytes_ = aligned_bytes(whole.nbytes)
            view(bytes_, part).copy_(dense(flat, desc))
            found[place] = view(bytes_, whole)
        for place, desc in enumerate(descs):
            if place not in found:
                if 0 not in desc.dims or not desc.is_plain:
                    raise PlanError(f"the numbers of its tensor {place} are missing")
                found[place] = view(torch.empty(0, dtype=torch.uint8), desc)
        return [found[place] for place in range(len(descs))]

    def _forms(self) -> Iterator[tuple[int, MemoryDesc, MemoryDesc, torch.Tensor]]:
        """Yield a tensor, where numbers lie in it, their format, and their bytes."""
        for place, *given, block in self._row["forms"]:
            part, desc = (at(self._descs, one, "format") for one in given)
            flat = at(self._blocks, block, "block")
            if not part.is_plain or desc.kind != "blocked" or part.dims != desc.dims or part.dtype is not desc.dtype:
                raise PlanError(f"its tensor {place} has no such form")
            if desc.nbytes > flat.numel() or desc.has_broadcast or part.has_broadcast:
                raise PlanError(f"its tensor {place} has another size than its block")
            yield place, part, desc, flat[: desc.nbytes]

    def _note(self, tensors: Sequence[torch.Tensor], forms: SharedForms) -> None:
        """Take note of the plans' packed forms: plans for other shapes share them."""
        plans = [item for plan in self._plans for item in plan.weights.items()]
        known = {(flat.data_ptr(), desc): flat for _, desc, flat in plans if flat.layout is torch.strided}
        for place, part, desc, flat in self._forms():
            tensor, mine = at(tensors, place, "tensor"), known.get((flat.data_ptr(), desc))
            numbers = forms.numbers(view_of_tensor(tensor, part)) if mine is not None else None
            if mine is not None and numbers is not None:
                forms.note(numbers, desc, mine)
