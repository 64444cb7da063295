"""Weights by reference: blocks that a plan file does not have, since the user's own weights file has their numbers.

A row says where in the other file the numbers are, how they lie there, and what was done to them: factors along an
axis, a conversion, packing. So any file with plain numbers in it will do, and none is parsed here. The plan names the
file, without a path, and its digest: a plan from a stranger can use only a file beside it whose whole content the
stranger already had.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fmtprop.errors import PlanError
from fmtprop.ir.tensors import torch_dtype
from fmtprop.layout import DataType, MemoryDesc, pack
from fmtprop.planfile.container import checksum_of
from fmtprop.planfile.descs import at
from fmtprop.system.files import opened, path_of
from fmtprop.targets.memory import align, aligned_bytes

_KEYS = {"files": list, "blocks": list}

#: most bytes of a weights file: more than any machine's memory
_MOST_NBYTES = 1 << 46
#: most bytes of blocks for each byte of the files, and besides: a tensor may be packed for several shapes
_MOST_FORMS, _MOST_BESIDES_NBYTES = 4, 1 << 26

#: same-sized numbers as integers, for NumPy, which has no bf16
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Recipe:
    """How a block is made from a range of bytes of a file."""

    dtype: DataType
    #: the block's axes in the order in which they lie in the file
    order: tuple[int, ...]
    desc: MemoryDesc
    #: the axis with a factor for each index
    axis: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the range."""
        return self.desc.nelems * self.dtype.nbytes

    def numbers(self, raw: torch.Tensor) -> torch.Tensor:
        """Return the numbers of a range, with the block's axes."""
        if raw.data_ptr() % self.dtype.nbytes:
            raw = raw.clone()
        shape = [self.desc.dims[axis] for axis in self.order]
        inverse = sorted(range(len(shape)), key=self.order.__getitem__)
        return raw.view(torch_dtype(self.dtype)).reshape(shape).permute(inverse)

    def block(self, raw: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
        """Return the block: flat bytes in its format, filled up with zeros to the alignment.

        `factors`: factors in f64; products are rounded to f32, then to the block's data type.
        """
        numbers, desc = self.numbers(raw), self.desc
        if factors is not None and self.axis is not None:
            sizes = [1] * desc.ndim
            sizes[self.axis] = -1
            numbers = (numbers.double() * factors.reshape(sizes)).float()
        bits = numbers.to(torch_dtype(desc.dtype)).contiguous().view(_BITS[desc.dtype.nbytes])
        flat = aligned_bytes(align(desc.nbytes)).zero_()
        pack(bits.numpy().view(desc.dtype.numpy_dtype), desc, flat.numpy()[: desc.nbytes])
        return flat


@dataclass(frozen=True)
class WeightsFile:
    """A file that a plan refers to."""

    name: str
    nbytes: int
    sha256: str

    def mapped(self, place: Path, *, links: bool) -> memoryview:
        """Return the bytes of the file at a place; with `links`, the place may be a link."""
        try:
            with opened(place, _MOST_NBYTES, links=links) as file:
                size = os.fstat(file.fileno()).st_size
                if size != self.nbytes or not size:
                    raise PlanError(f"{self} of {self.nbytes} bytes, but {place} has {size}: {_REMEDY}")
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        except FileNotFoundError:
            raise PlanError(f"{self}, but there is no {place}: {_NAME_IT}") from None
        except OSError as error:
            raise PlanError(f"{self}, but {place} cannot be read: {error.strerror}; {_NAME_IT}") from error

    def check(self, data: memoryview, place: Path) -> None:
        """Compare the file's digest."""
        found = hashlib.sha256(data).hexdigest()
        if found != self.sha256:
            raise PlanError(f"{self}, but {place} has {found}, so it is another file, or was changed: {_REMEDY}")

    def __str__(self) -> str:
        return f"its weights are in {self.name!r} with the SHA-256 {self.sha256}"


_NAME_IT = "put that file there, or say where it is: fp.load_plan(..., weights=PATH)"
_REMEDY = "bring that file back, or compile the model and save the plan again"


class References:
    """The blocks of a plan file, those that are made of other files' bytes included.

    `row`: what the document says of them, of which nothing is trusted; None without any. `descs`, `blocks`: the
    document's formats, and the blocks in the file. `folder`: the plan file's folder; None for bytes.
    """

    def __init__(
        self,
        row: Any,
        descs: Sequence[MemoryDesc],
        blocks: Sequence[torch.Tensor],
        folder: Path | None = None,
        given: Any = None,
    ) -> None:
        self.blocks = list(blocks)
        self._files: list[tuple[WeightsFile, memoryview, Path]] = []
        if row is None:
            if given is not None:
                raise PlanError("has its weights inside: leave out weights=")
            return
        if not isinstance(row, dict) or {key: type(row.get(key)) for key in row} != _KEYS:
            raise PlanError(f"its weights must have the keys {', '.join(_KEYS)}")
        files = [_file(item) for item in row["files"]]
        for file, place in zip(files, _places(files, folder, given), strict=True):
            self._files.append((file, file.mapped(place, links=given is not None), place))
        self._left = _MOST_BESIDES_NBYTES + _MOST_FORMS * sum(file.nbytes for file in files)
        for item in row["blocks"]:
            self._make(item, descs, blocks)

    def check(self, checksums: Sequence[object]) -> None:
        """Compare the files with their digests, and the blocks with their checksums."""
        for file, data, place in self._files:
            file.check(data, place)
        if len(checksums) != len(self.blocks):
            raise PlanError(f"has {len(self.blocks)} blocks of weights, its document names {len(checksums)}")
        for index, (block, expected) in enumerate(zip(self.blocks, checksums, strict=True)):
            if checksum_of(block) != expected:
                raise PlanError(f"is damaged: block {index} of its weights does not have the document's checksum")

    def _make(self, item: Any, descs: Sequence[MemoryDesc], blocks: Sequence[torch.Tensor]) -> None:
        try:
            block, file, offset, dtype, order, desc, axis, factors = item
            recipe = Recipe(DataType(dtype), tuple(order), at(descs, desc, "format"), axis)
            data, ndim = at(self._files, file, "weights file")[1], recipe.desc.ndim
            is_known = recipe.desc.kind == "blocked" and not recipe.desc.has_broadcast
            numbered = is_known and sorted(order) == list(range(ndim)) and (axis is None or axis in range(ndim))
            if not numbered or type(offset) is not int or not 0 <= offset <= len(data) - recipe.nbytes:
                raise ValueError("its axes or its place do not fit")
            if at(blocks, block, "block").numel() or not recipe.nbytes:
                raise ValueError("its block is in the file")
            self._left -= align(recipe.desc.nbytes)
            if self._left < 0:
                raise ValueError("all of them are much larger than the files")
            raw = torch.frombuffer(data, dtype=torch.uint8, offset=offset, count=recipe.nbytes)
            scale = None
            if axis is not None:
                count = recipe.desc.dims[axis]
                scale = at(blocks, factors, "block")[: 8 * count].view(torch.float64)
            self.blocks[block] = recipe.block(raw, scale)
        except (TypeError, ValueError, KeyError, RuntimeError) as error:
            raise PlanError(f"its reference {str(item)[:80]} is malformed: {str(error).splitlines()[0]}") from error


def _file(item: Any) -> WeightsFile:
    if not isinstance(item, list) or [type(part) for part in item] != [str, int, str]:
        raise PlanError(f"its weights file {str(item)[:80]} must be a name, a size and a digest")
    name, nbytes, digest = item
    if name in ("", ".", "..") or set(name) & set("/\\:\0") or len(name) > _MOST_NAME or len(digest) != _DIGEST:
        raise PlanError(f"its weights file {name[:80]!r} must be the name of a file, without a path, and its SHA-256")
    return WeightsFile(name, nbytes, digest)


#: characters of a file's name, and of a digest
_MOST_NAME, _DIGEST = 255, 64


def _places(files: Sequence[WeightsFile], folder: Path | None, given: Any) -> list[Path]:
    """Return where the files are: where the caller says, else beside the plan."""
    if given is None:
        if folder is None:
            raise PlanError(f"{files[0]}: say where it is: fp.load_plan(..., weights=PATH)" if files else "is damaged")
        return [folder / file.name for file in files]
    paths = [path_of(one) for one in (given if isinstance(given, list | tuple) else [given])]
    if len(paths) == 1 and paths[0].is_dir():
        return [paths[0] / file.name for file in files]
    if len(paths) != len(files):
        raise PlanError(
            f"its weights are in {len(files)} files ({', '.join(file.name for file in files)[:200]}), weights= names "
            f"{len(paths)}: give them in this order, or their folder"
        )
    return paths
