"""Take archives of torch.export apart and put them together again."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping

import torch


def save(program: torch.export.ExportedProgram) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()


def read_members(archive: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        return {name.partition("/")[2]: file.read(name) for name in file.namelist()}


def pack(members: Mapping[str, bytes], root: str = "model/", compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, content in members.items():
            # of one date: what the bytes of an archive are as a pickle must not depend on the clock
            file.writestr(zipfile.ZipInfo(root + name), content, compression)
    return buffer.getvalue()
