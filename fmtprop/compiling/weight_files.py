"""The user's weights files while a plan is saved by reference: which of their bytes are a plan's numbers.

Numbers are found by their values: as they are in the file, with axes in another order, in another floating data type,
or multiplied by a factor for each index of an axis, as folded normalizations are. A block that is made again from the
file's bytes, bit by bit, need not be in the plan file.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import mmap
import os
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fmtprop.errors import ImportModelError, PlanError
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.planfile.references import Recipe
from fmtprop.runtime.weights import dense
from fmtprop.system.files import opened, path_of

#: smaller blocks stay in the plan file
SMALL_NBYTES = 1 << 12
#: axes whose orders are all tried
_MOST_AXES = 4
#: numbers that are compared before all are, and of a row whose quotients are
_SAMPLE = 64
#: how much quotients of rounded numbers may differ: some roundings of each type
_SPREADS = {DataType.F32: 1e-5, DataType.BF16: 0.05, DataType.F16: 0.01}
#: bits that a data type's fraction lacks beside f32's
_LACKING_BITS = {DataType.F32: 0, DataType.BF16: 16, DataType.F16: 13}


class Range(NamedTuple):
    """Bytes of a file."""

    file: int
    offset: int
    nbytes: int


class Found(NamedTuple):
    """How a block is made from a file."""

    range: Range
    recipe: Recipe
    factors: torch.Tensor | None


class WeightFiles:
    """The user's files, and the ranges of bytes in them that are tensors.

    `paths`: files ending in ``.safetensors``, ``.onnx`` (with its external data), ``.pt2`` or ``.pt``.
    """

    def __init__(self, paths: Any) -> None:
        #: the files with tensors
        self.paths: list[Path] = []
        self._data: list[torch.Tensor] = []
        self._ranges: dict[int, list[Range]] = {}
        self._used: set[Range] = set()
        given = paths if isinstance(paths, list | tuple) else [paths]
        #: the names of the files, as given
        self.given = ", ".join(map(str, given))
        if not given:
            raise PlanError("weights= names no file: give the one that has the model's weights, or leave it out")
        for path in given:
            try:
                for file, offset, nbytes in _ranges(path_of(path)):
                    self._ranges.setdefault(nbytes, []).append(Range(self._place(file), offset, nbytes))
            except OSError as error:
                raise PlanError(f"weights file {path}: cannot be read: {error.strerror}") from error
            except (ImportModelError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
                raise PlanError(
                    f"weights file {path}: is no .safetensors, .onnx, .pt2 or .pt file, or is damaged: {error}"
                ) from error

    def find(self, flat: torch.Tensor, desc: MemoryDesc) -> Found | None:
        """Return how a block is made from a file, None if no file has its numbers."""
        if flat.numel() < SMALL_NBYTES or desc.kind != "blocked" or desc.has_broadcast or desc.dtype not in _TYPES:
            return None
        numbers = dense(flat, desc)
        found = next((one for one in self._candidates(numbers, desc) if self._makes(one, flat)), None)
        if found is not None:
            self._used.add(found.range)
        return found

    def used(self) -> list[int]:
        """Return the numbers of the files in which something was found, in order."""
        return sorted({where.file for where in self._used})

    def rows(self) -> list[list[Any]]:
        """Return the name, the size and the digest of each of these files."""
        rows: list[list[Any]] = []
        for number in self.used():
            data = self._data[number].numpy().data
            rows.append([self.paths[number].name, len(data), hashlib.sha256(data).hexdigest()])
        names = [row[0] for row in rows]
        if len(set(names)) != len(names):
            raise PlanError(f"weights files must have different names, got {', '.join(sorted(names))}")
        return rows

    def _place(self, path: Path) -> int:
        path = path.absolute()
        if path not in self.paths:
            with opened(path, 1 << 46) as file:
                pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self.paths.append(path)
            self._data.append(torch.frombuffer(pages, dtype=torch.uint8))
        return self.paths.index(path)

    def _raw(self, where: Range) -> torch.Tensor:
        return self._data[where.file][where.offset : where.offset + where.nbytes]

    def _makes(self, found: Found, flat: torch.Tensor) -> bool:
        made = found.recipe.block(self._raw(found.range), found.factors)
        return torch.equal(made[: flat.numel()], flat)

    def _candidates(self, numbers: torch.Tensor, desc: MemoryDesc) -> Iterator[Found]:
        """Yield what may make a block, by a sample of its numbers: those without factors first."""
        pairs = list(self._pairs(desc))
        for where, recipe in pairs:
            if _is_alike(recipe.numbers(self._raw(where)), numbers):
                yield Found(where, recipe, None)
        if desc.dtype not in _SPREADS:
            return
        for where, recipe in pairs:
            source = recipe.numbers(self._raw(where))
            for axis in range(desc.ndim) if desc.ndim > 1 else ():
                if _is_scaled(source.select(axis, 0), numbers.select(axis, 0), _SPREADS[desc.dtype]):
                    factors = _factors(source, numbers, axis, _LACKING_BITS[desc.dtype])
                    yield Found(where, Recipe(recipe.dtype, recipe.order, desc, axis), factors)

    def _pairs(self, desc: MemoryDesc) -> Iterator[tuple[Range, Recipe]]:
        others = _FLOATS if desc.dtype in _FLOATS else ()
        for dtype in dict.fromkeys((desc.dtype, *others)):
            ranges = self._ranges.get(desc.nelems * dtype.nbytes, [])
            for where in sorted(ranges, key=lambda one: one in self._used):
                for order in _orders(desc.dims):
                    yield where, Recipe(dtype, order, desc)


_FLOATS = (DataType.F32, DataType.BF16, DataType.F16)
_TYPES = frozenset((*_FLOATS, DataType.S8, DataType.U8, DataType.S32))


def _orders(dims: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the orders in which axes may lie; one of size 1 may lie anywhere."""
    long = [axis for axis, size in enumerate(dims) if size > 1]
    short = [axis for axis, size in enumerate(dims) if size <= 1]
    if len(long) > _MOST_AXES:
        yield tuple(range(len(dims)))
        return
    for order in itertools.permutations(long):
        yield (*order, *short)


def _is_alike(source: torch.Tensor, numbers: torch.Tensor) -> bool:
    """Return whether a sample of numbers is equal after a conversion."""
    places = np.unravel_index(np.linspace(0, numbers.numel() - 1, _SAMPLE, dtype=np.int64), tuple(numbers.shape))
    index = tuple(torch.from_numpy(place) for place in places)
    return torch.equal(source[index].to(numbers.dtype), numbers[index])


def _is_scaled(source: torch.Tensor, row: torch.Tensor, spread: float) -> bool:
    """Return whether quotients of a row's first numbers are about the same."""
    first, scaled = _first(source).double(), _first(row).double()
    quotients = (scaled / first)[first != 0]
    if not len(quotients) or not quotients.isfinite().all():
        return False
    low, high = quotients.min().item(), quotients.max().item()
    return high - low <= spread * max(abs(low), abs(high))


def _first(tensor: torch.Tensor) -> torch.Tensor:
    for axis, size in enumerate(tensor.shape):
        tensor = tensor.narrow(axis, 0, min(size, _SAMPLE // 8 if tensor.ndim > 1 else _SAMPLE))
    return tensor.reshape(-1)


def _factors(source: torch.Tensor, numbers: torch.Tensor, axis: int, lacking: int) -> torch.Tensor:
    """Return a factor for each index of an axis: from the middle of those that round to the numbers."""
    first = source.movedim(axis, 0).reshape(source.shape[axis], -1).double().numpy()
    scaled = numbers.movedim(axis, 0).reshape(first.shape).float().numpy()
    size = np.abs(scaled)
    above = np.spacing(size).astype(np.float64) * 2**lacking / 2
    below = np.where(np.frexp(size)[0] == 0.5, above / 2, above)  # numbers below a power of two are twice as close
    toward_zero, away = np.copysign(size - below, scaled), np.copysign(size + above, scaled)
    with np.errstate(all="ignore"):
        ends = np.stack((toward_zero / first, away / first))
    low = np.where(first == 0, -math.inf, ends.min(0)).max(1)
    high = np.where(first == 0, math.inf, ends.max(0)).min(1)
    middle = (low + high) / 2
    return torch.from_numpy(np.where(np.isfinite(middle), middle, 1.0))


# ---------------------------------------------------------------- files


def _ranges(path: Path) -> Iterator[tuple[Path, int, int]]:
    """Yield where tensors lie: the file, the offset, the number of bytes."""
    with opened(path, 1 << 46) as file:
        head = file.read(9)
        if head[:2] == b"PK":
            yield from _of_zip(path, file)
        elif head[8:] == b"{":
            yield from _of_safetensors(path, file)
        else:
            yield from _of_onnx(path, file)


def _of_safetensors(path: Path, file: Any) -> Iterator[tuple[Path, int, int]]:
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(min(length, 1 << 27)))
    size = os.fstat(file.fileno()).st_size
    for name, entry in header.items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            if not 0 <= first <= last <= size - 8 - length:
                raise ValueError(f"tensor {name} lies outside of the file")
            yield path, 8 + length + first, last - first


def _of_zip(path: Path, file: Any) -> Iterator[tuple[Path, int, int]]:
    """Yield the entries that are not compressed: those with numbers are not."""
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.compress_type == zipfile.ZIP_STORED and entry.file_size:
                file.seek(entry.header_offset + _ZIP_LENGTHS)
                lengths = file.read(4)
                extra = int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
                yield path, entry.header_offset + _ZIP_LENGTHS + 4 + extra, entry.file_size


#: place of the lengths of a name and of extra data in the header before an entry
_ZIP_LENGTHS = 26


def _of_onnx(path: Path, file: Any) -> Iterator[tuple[Path, int, int]]:
    """Yield the initialisers: large ones in the file, and those of external data."""
    import onnx
    from google.protobuf.message import DecodeError

    from fmtprop.onnx.model.tensor_files import OwnData

    own = OwnData(file, str(path), SMALL_NBYTES)
    try:
        model = onnx.ModelProto.FromString(own.rest)
    except DecodeError as error:
        raise ValueError(str(error)) from error
    for offset, nbytes in own.places.values():
        yield path, offset, nbytes
    for tensor in model.graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if "location" in entries and "length" in entries:
            yield path.parent / entries["location"], int(entries.get("offset", "0")), int(entries["length"])
