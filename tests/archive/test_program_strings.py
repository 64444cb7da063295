"""Whatever string of an exported program is replaced by code, the code does not run."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fmtprop
from fmtprop.archive.pt2_safety import check_archive
from fmtprop.capture import load
from fmtprop.errors import FmtpropError, ImportModelError
from tests.archive.archives import pack, read_members, save

PROGRAM = "models/model.json"
JSON = (PROGRAM, "data/weights/model_weights_config.json", "data/constants/model_constants_config.json")


class Names(nn.Module):
    """Parameters, buffers, constants, tied weights, keys of modules that are no identifiers."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"a-b": nn.Linear(3, 3), "3x3 conv/0": nn.Linear(3, 3), "größe": nn.Linear(3, 3)})
        self.parts["3x3 conv/0"].weight = self.parts["a-b"].weight
        self.register_buffer("gain", torch.randn(3))
        self.register_buffer("shift", torch.randn(3), persistent=False)
        self.constant = torch.randn(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts.values():
            x = torch.einsum("bi,ij->bj", part(x), torch.ones(3, 3)) * self.gain
        return nn.functional.gelu(x, approximate="tanh") + self.shift + self.constant


class Arguments(nn.Module):
    """Dictionaries, lists, strings, positional and keyword arguments, several results."""

    def forward(self, x: Any, *more: Any, how: str, **named: Any) -> Any:
        first, second = torch.split(x["pixel values"] + more[0], 1)
        return {"sum": first + named["größe"], "parts": [second, len(how)], "max": tuple(torch.max(x["mask"][0], 1))}


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[0] > 1, lambda: "don't")
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)) * (x.shape[0] // 2)


def export_names() -> torch.export.ExportedProgram:
    return torch.export.export(Names().eval(), (torch.randn(2, 3),))


def export_arguments() -> torch.export.ExportedProgram:
    x = {"pixel values": torch.randn(2, 3), "mask": [torch.randn(2, 3)]}
    return torch.export.export(Arguments(), (x, torch.randn(3)), {"how": "same", "größe": torch.randn(3)})


def export_branch() -> torch.export.ExportedProgram:
    return torch.export.export(Branch(), (torch.randn(4, 3),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))


PROGRAMS = {"names": export_names, "arguments": export_arguments, "branch": export_branch}


@cache
def members_of(name: str) -> dict[str, bytes]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return read_members(save(PROGRAMS[name]()))


PAYLOADS = {
    "argument": 'x=open({mark!r},"w")',
    "call": 'open({mark!r},"w")',
    "statement": 'x = open({mark!r},"w"); y',
    "line": 'x\n    open({mark!r},"w")\n    y',
    "double quotes": '{text}") if open({mark!r},"w") else ("',
    "double quotes, sum": '{text}" + str(open({mark!r},"w")) + "',
    "single quotes": '{text}\' + str(open("{mark}","w")) + \'',
    "single quotes, comparison": '{text}\' == open("{mark}","w") or \'',
    "backslash": "{text}\\",
}

Place = tuple[Any, ...]


def places_in(value: Any, place: Place = ()) -> Iterator[tuple[Place, str]]:
    """Find every string of nested JSON, keys too; a place ends in True for a key."""
    if isinstance(value, str):
        yield (*place, False), value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if isinstance(key, str):
            yield (*place, key, True), key
        yield from places_in(item, (*place, key))


def replaced(value: Any, new: Callable[[Place, str], str], place: Place = ()) -> Any:
    """Copy nested JSON with other strings."""
    if isinstance(value, str):
        return new((*place, False), value)
    if isinstance(value, list):
        return [replaced(item, new, (*place, index)) for index, item in enumerate(value)]
    if isinstance(value, dict):
        return {new((*place, key, True), key): replaced(item, new, (*place, key)) for key, item in value.items()}
    return value


def attack(members: dict[str, bytes], tmp_path: Path) -> bool:
    """Load and compile an archive; return whether the gate refused it. Nothing but our errors may come."""
    path, mark = tmp_path / "model.pt2", tmp_path / "mark"
    path.write_bytes(pack(members))
    refused = False
    try:
        check_archive(path)
    except ImportModelError:
        refused = True
    if not refused:
        with warnings.catch_warnings(), suppress(FmtpropError):
            warnings.simplefilter("ignore")
            fmtprop.compile(load(path), policy="plain", verify="off")
    assert not mark.exists()
    return refused


def renamed(name: str, text: str, payload: str) -> dict[str, bytes]:
    """Put a payload for a string wherever it is found."""
    changed = dict(members_of(name))
    for member in JSON:
        program = replaced(json.loads(changed[member]), lambda place, found: payload if found == text else found)
        changed[member] = json.dumps(program).encode()
    return changed


def is_note(place: Place) -> bool:
    """Tell whether PyTorch only keeps or escapes what is there: metadata, and text among a node's arguments."""
    return not place[-1] and ("metadata" in place or ("as_string" in place and "nodes" in place))


def fields_of_schema() -> set[str]:
    """Return the names of fields: a program without them is damaged, which says nothing about its strings."""
    from dataclasses import fields, is_dataclass

    from torch._export.serde import schema

    kinds = [kind for kind in vars(schema).values() if isinstance(kind, type) and is_dataclass(kind)]
    return {field.name for kind in kinds for field in fields(kind)} | {"config"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_honest_program_passes(name: str, tmp_path: Path) -> None:
    """What is refused below is refused for the string that differs."""
    path = tmp_path / "model.pt2"
    path.write_bytes(pack(members_of(name)))
    check_archive(path)
    torch.export.load(path)


def test_honest_programs_compile(tmp_path: Path) -> None:
    for name in ("names", "arguments"):
        path = tmp_path / "model.pt2"
        path.write_bytes(pack(members_of(name)))
        fmtprop.compile(load(path), policy="plain")


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_name_that_is_code_is_refused(name: str, payload: str, tmp_path: Path) -> None:
    """Every string is renamed consistently, so that the program still fits together."""
    places = [place for member in JSON for place in places_in(json.loads(members_of(name)[member]))]
    inert = {text for place, text in places if is_note(place) or "as_string" in place}
    for text in sorted({text for _, text in places} - inert - fields_of_schema()):
        code = PAYLOADS[payload].format(mark=str(tmp_path / "mark"), text=text)
        assert attack(renamed(name, text, code), tmp_path), f"{text!r} became {code!r} and was not refused"


@pytest.mark.parametrize("name", PROGRAMS)
def test_note_that_is_code_stays_a_note(name: str, tmp_path: Path) -> None:
    """What lies in metadata, and the text among a node's arguments, is let through and does not run."""
    for payload in PAYLOADS.values():

        def code(place: Place, text: str, payload: str = payload) -> str:
            return payload.format(mark=str(tmp_path / "mark"), text=text) if is_note(place) else text

        program = replaced(json.loads(members_of(name)[PROGRAM]), code)
        assert not attack({**members_of(name), PROGRAM: json.dumps(program).encode()}, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_string_that_is_code_does_not_run(name: str, payload: str, tmp_path: Path) -> None:
    """Every string alone, in its one place; the notes are another test's affair."""
    fields = fields_of_schema()
    for member in JSON:
        program = json.loads(members_of(name)[member])
        for place, text in list(places_in(program)):
            if is_note(place) or text in fields:
                continue
            code = PAYLOADS[payload].format(mark=str(tmp_path / "mark"), text=text)
            changed = replaced(program, lambda at, found, place=place, code=code: code if at == place else found)
            attack({**members_of(name), member: json.dumps(changed).encode()}, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_field_that_is_code_does_not_run(name: str, tmp_path: Path) -> None:
    for field in sorted(fields_of_schema()):
        attack(renamed(name, field, PAYLOADS["argument"].format(mark=str(tmp_path / "mark"))), tmp_path)
