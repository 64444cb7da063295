"""Check of a ``.pt2`` archive before PyTorch opens it: members that would execute code are refused.

``torch.export.load`` trusts its file: it unpickles example inputs and some weights without restriction, evaluates
strings of the program as Python, and loads compiled libraries. This check reads the archive without PyTorch and
accepts only the members that ``torch.export.save`` writes for a module of plain tensors. Unknown members are refused.
Two forms are accepted: the archive of PyTorch 2.8 and later, and the flat one of 2.5 to 2.7.

It decides nothing about the model, and must not import torch.

References
----------
``torch/export/pt2_archive/_package.py`` (``load_pt2``), ``torch/csrc/export/pt2_archive_constants.h``, and
``torch/export/__init__.py`` (``load``, for the flat form).
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from fmtprop.archive.pickle_safety import check_tensor_file
from fmtprop.archive.program_safety import check_path, check_program, parse_json
from fmtprop.archive.strict_zip import read_members
from fmtprop.errors import ImportModelError

_MODEL = r"[^/]+"
_PROGRAM = re.compile(rf"models/{_MODEL}\.json|serialized_exported_program\.json")
_PAYLOAD = re.compile(rf"data/(weights/{_MODEL}_weights|constants/{_MODEL}_constants)_config\.json")
_TENSOR_FILE = re.compile(
    rf"data/(weights|constants|sample_inputs)/{_MODEL}\.pt|serialized_(state_dict|constants|example_inputs)\.pt"
)
# Raw bytes that are copied into tensors, short notes on the format, and the user's own text files.
_RAW = re.compile(r"data/(weights/weight|constants/tensor)_\d+")
_NOTE = re.compile(r"archive_format|archive_version|byteorder|version|\.format_version|\.storage_alignment|\.data/\w+")
_EXTRA = re.compile(r"extra/.+|extra_files/.+")

# Members with code or objects, and their description.
_FOREIGN = (
    (re.compile(r"data/aotinductor/.*"), "compiled code, which PyTorch would load into this process"),
    (re.compile(r"data/constants/(custom_obj|opaque_obj).*"), "a Python or C++ object, which PyTorch would build"),
    (re.compile(r"code/.*|constants\.pkl"), "TorchScript code; fmtprop imports torch.export programs"),
    (re.compile(r"data\.pkl"), "the pickle of a torch.save file, which holds no program"),
)


def check_archive(path: str | os.PathLike[str]) -> None:
    r"""Refuse a ``.pt2`` archive that would execute anything when PyTorch opens it.

    Call it right before ``torch.export.load``, on a file that nothing can change in between. It reads pickles and
    JSON, not the weights, so its time does not depend on the size of the model's data.

    `path`: a file that ``torch.export.save`` wrote.

    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "model.pt2"
    ...     _ = path.write_bytes(b"cos\nsystem\n(S'echo hello'\ntR.")
    ...     check_archive(path)  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
        ...
    fmtprop.errors.ImportModelError: ...model.pt2 is not a zip file, so it is not a torch.export archive
    """
    name = os.fspath(path)
    try:
        with Path(path).open("rb") as file:
            empty = os.fstat(file.fileno()).st_size == 0
            # Not closed explicitly: the traceback of an error may keep views into it.
            content = b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ImportModelError(f"cannot read {name}: {error.strerror or error}") from error
    members = _without_root(read_members(memoryview(content), name), name)
    for member, data in members.items():
        _check_member(member, data, members, f"{name}: member {member!r}")


def _without_root(members: Mapping[str, memoryview], name: str) -> Mapping[str, memoryview]:
    """Remove the folder that contains all members; the flat form has none."""
    if "serialized_exported_program.json" in members:
        if "/" in (first := next(iter(members))):
            # PyTorch would take that folder as the root and read an archive of the other form in it.
            raise ImportModelError(f"{name} is not a torch.export archive: its first member {first!r} lies in a folder")
        return members
    roots = {member.partition("/")[0] for member in members}
    if len(roots) != 1:
        raise ImportModelError(f"{name} is not a torch.export archive: its members are not in one folder")
    inner = {member.partition("/")[2]: data for member, data in members.items()}
    for member in inner:
        _refuse_foreign(member, f"{name}: member {member!r}")
    if inner.get("archive_format", b"") != b"pt2":
        raise ImportModelError(f"{name} is not a torch.export archive: no member 'archive_format' says 'pt2'")
    return inner


def _refuse_foreign(member: str, where: str) -> None:
    for pattern, meaning in _FOREIGN:
        if pattern.fullmatch(member):
            raise ImportModelError(
                f"{where} is {meaning}. Export the module with torch.export.export and torch.export.save, "
                "without compiled code or custom objects"
            )


def _check_member(member: str, data: memoryview, members: Mapping[str, memoryview], where: str) -> None:
    _refuse_foreign(member, where)
    if _PROGRAM.fullmatch(member):
        check_program(bytes(data), where)
    elif _PAYLOAD.fullmatch(member):
        _check_payload(parse_json(bytes(data), where), member.rpartition("/")[0], members, where)
    elif _TENSOR_FILE.fullmatch(member):
        check_tensor_file(data, where)
    elif not (_RAW.fullmatch(member) or _NOTE.fullmatch(member) or _EXTRA.fullmatch(member)):
        raise ImportModelError(
            f"{where} is of a kind that fmtprop does not know, so it cannot tell whether opening it is safe. If you "
            "trust the file, load it yourself with torch.export.load and pass the ExportedProgram"
        )


def _check_payload(config: Any, folder: str, members: Mapping[str, memoryview], where: str) -> None:
    """Check the list of weights or constants: the member of each, and whether PyTorch unpickles it."""
    entries = config.get("config") if isinstance(config, dict) else None
    if not isinstance(entries, dict):
        raise ImportModelError(f"{where} is not a list of weights")
    for weight, entry in entries.items():
        check_path(weight, where)
        at = f"{where}: {weight!r}"
        held_by = entry.get("path_name") if isinstance(entry, dict) else None
        source = f"{folder}/{held_by}"
        if not isinstance(held_by, str) or source not in members:
            raise ImportModelError(f"{at} lies in {held_by!r}, which is no member of {folder}/")
        _refuse_foreign(source, f"{at} lies in {held_by!r}, which")
        if not _RAW.fullmatch(source):
            raise ImportModelError(f"{at} lies in {held_by!r}, which does not hold a tensor")
        if entry.get("use_pickle") is True:
            check_tensor_file(members[source], f"{at} lies in {held_by!r}, which")
        elif entry.get("use_pickle") is False:
            _check_size(entry.get("tensor_meta"), len(members[source]), at)
        else:
            raise ImportModelError(f"{at} does not say whether it is pickled: use_pickle={entry.get('use_pickle')!r}")


def _check_size(meta: Any, stored: int, at: str) -> None:
    """Check that a tensor without data has no elements, since PyTorch would allocate its declared size."""
    sizes = meta.get("sizes") if isinstance(meta, dict) else None
    dims = [size.get("as_int") if isinstance(size, dict) else None for size in sizes or ()]
    fixed = [dim for dim in dims if type(dim) is int and dim >= 0]
    if not isinstance(sizes, list) or len(fixed) != len(dims):
        raise ImportModelError(f"{at} has no fixed size: {sizes!r}")
    if stored == 0 and prod(fixed) > 0:
        raise ImportModelError(
            f"{at} declares {prod(fixed)} elements but has no data; export the model with its weights"
        )
