"""Places of oneDNN libraries, in order of preference: first the newest that shares PyTorch's threads.

Knows packages, directories and environment variables; must not load anything. Two oneDNN libraries in one process may
share C++ symbols of different shapes, so version and dependencies are read from the file: ``dnnl_version`` returns the
address of a constant.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from itertools import islice
from pathlib import Path

_DYNAMIC, _DYNSYM = 6, 11  # types of sections
_LOAD = 1  # type of segment
_NEEDED = 1  # tag of a dynamic entry
_X86_64 = 62
#: `lea rax, [rip + offset]`: the instruction that computes the constant's address
_LOAD_ADDRESS = b"\x48\x8d\x05"
_FULL_NAME = re.compile(r"\.so\.(\d+)\.(\d+)(?:\.(\d+))?$")

Version = tuple[int, ...]


@dataclass(frozen=True)
class Build:
    """Facts read from a library file."""

    #: major, minor and, if the file has it, patch
    version: Version | None = None
    #: file names of the libraries that it is linked to
    needs: frozenset[str] = frozenset()


def read_build(path: str | os.PathLike[str]) -> Build:
    """Read version and dependencies of a oneDNN library from its file.

    Result: facts that the file does not have are absent. A full file name (``libdnnl.so.3.2``) is enough for the
    version.

    >>> read_build("/nowhere/libdnnl.so.3.4")
    Build(version=(3, 4), needs=frozenset())
    """
    full = _FULL_NAME.search(os.path.realpath(path))
    named = tuple(int(part) for part in full.groups() if part is not None) if full else None
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            elf = _Elf(data)
            return Build(elf.version() or named, frozenset(elf.needs()))
    except (OSError, ValueError, OverflowError, IndexError, struct.error):  # missing, of another format, or damaged
        return Build(named)


@dataclass(frozen=True)
class _Section:
    kind: int
    offset: int
    nbytes: int
    strings: int  # index of the section with its names


class _Elf:
    """A 64-bit little-endian ELF file; raises `ValueError` or `struct.error` for another file."""

    def __init__(self, data: mmap.mmap) -> None:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not a 64-bit little-endian ELF file")
        self._data = data
        (self._machine,) = struct.unpack_from("<H", data, 18)
        segments, sections = struct.unpack_from("<QQ", data, 32)
        self._segments = [
            struct.unpack_from("<IIQQQQ", data, segments + k * 56) for k in range(struct.unpack_from("<H", data, 56)[0])
        ]
        headers = [
            struct.unpack_from("<IIQQQQI", data, sections + k * 64)
            for k in range(struct.unpack_from("<H", data, 60)[0])
        ]
        self._sections = [_Section(kind, offset, size, link) for _, kind, _, _, offset, size, link in headers]

    def needs(self) -> Iterator[str]:
        """Yield the names of the libraries that it is linked to."""
        section, names = self._of_kind(_DYNAMIC)
        for at in range(section.offset, section.offset + section.nbytes, 16):
            tag, value = struct.unpack_from("<QQ", self._data, at)
            if tag == _NEEDED:
                start = names.offset + value
                yield self._data[start : self._data.find(b"\0", start)].decode("utf-8", "replace")

    def version(self) -> Version | None:
        """Return the three numbers at the address that ``dnnl_version`` returns."""
        function = self._function(b"dnnl_version")
        if function is None or self._machine != _X86_64:
            return None
        start, nbytes = function
        at = self._data.find(_LOAD_ADDRESS, self._offset(start), self._offset(start) + nbytes)
        if at < 0:
            return None
        end = start + at - self._offset(start) + 7
        (distance,) = struct.unpack_from("<i", self._data, at + 3)
        numbers = struct.unpack_from("<3i", self._data, self._offset(end + distance))
        return numbers if all(0 <= number < 1000 for number in numbers) else None  # otherwise it is another function

    def _function(self, name: bytes) -> tuple[int, int] | None:
        """Return address and size of an exported function."""
        section, names = self._of_kind(_DYNSYM)
        table = self._data[names.offset : names.offset + names.nbytes]
        wanted = table.find(b"\0" + name + b"\0") + 1
        if not wanted:
            return None
        symbols = self._data[section.offset : section.offset + section.nbytes]
        for at, _, _, index, address, nbytes in struct.iter_unpack("<IBBHQQ", symbols):
            if at == wanted and index:
                return address, nbytes
        return None

    def _of_kind(self, kind: int) -> tuple[_Section, _Section]:
        section = next((section for section in self._sections if section.kind == kind), None)
        if section is None:
            raise ValueError(f"no section of type {kind}")
        return section, self._sections[section.strings]

    def _offset(self, address: int) -> int:
        """Return the file offset of a load address."""
        for kind, _, offset, start, _, nbytes in self._segments:
            if kind == _LOAD and start <= address < start + nbytes:
                return int(offset + address - start)
        raise ValueError(f"nothing is loaded at {address:#x}")


ENV_LIBRARY = "FMTPROP_DNNL_LIBRARY"
NAMES = ("libdnnl.so.3", "libdnnl.so")

# Distribution -> its description.
WHEELS = {
    "paddlepaddle": "wheel paddlepaddle (GNU OpenMP)",
    "onednn-cpu-gomp": "wheel onednn-cpu-gomp (GNU OpenMP)",
    "onednn-cpu-iomp": "wheel onednn-cpu-iomp (Intel OpenMP)",
    "onednn-cpu-tbb": "wheel onednn-cpu-tbb (TBB)",
    "onednn": "wheel onednn (DPC++)",
    "onednn-cpu-dpcpp-gpu-dpcpp": "wheel onednn-cpu-dpcpp-gpu-dpcpp (DPC++)",
}

INSTALL_HINT = (
    "install one with `pip install onednn-cpu-gomp` (oneDNN v3.2, OpenMP, 39 MB) or "
    "`conda install -c conda-forge onednn`, or point the environment variable "
    f"{ENV_LIBRARY} at a libdnnl.so.3 of any v3.x"
)

#: the version that `NEWER_HINT` brings
NEWER = (3, 6, 2)

NEWER_HINT = (
    "oneDNN v3.6.2 takes 0.96 to 0.99 times the time of v3.2 over ten networks (in bf16 ShuffleNetV2 0.79, BERT 0.87): "
    "`pip install fmtprop[newest]` (a wheel of 195 MB, 720 MB on disk, and what it depends on), or the wheel alone: "
    "`pip install --no-deps paddlepaddle`; it is found as a file and never imported"
)

#: kinds of threads of a library, in order of preference, and the drawback of each
_THREADS = ("GNU OpenMP", "threads of its own", "SYCL")
_DRAWBACKS = ("", "they compete with PyTorch's for the cores", "8 µs more per primitive")


@dataclass(frozen=True)
class Candidate:
    """A file that may be oneDNN."""

    #: path of the file, or a bare name that the dynamic loader resolves
    path: str
    origin: str
    build: Build = field(default=Build(), compare=False)

    @property
    def version(self) -> str:
        """Return the version as text; empty if the file does not have it."""
        return "v" + ".".join(map(str, self.build.version)) if self.build.version is not None else ""

    @property
    def usable(self) -> bool:
        """Whether no fact read from the file rules it out."""
        return self.build.version is None or self.build.version[0] == 3

    @property
    def threads(self) -> str:
        """Return the kind of its threads; PyTorch's threads are GNU OpenMP's."""
        return _THREADS[self.rank]

    @property
    def rank(self) -> int:
        """Return the preference for its threads; 0 is best."""
        if any(name.startswith("libsycl") for name in self.build.needs):
            return 2
        return int(not any(name.startswith("libgomp") for name in self.build.needs))


def candidates() -> list[Candidate]:
    """Return the installed libraries, best first, each file once."""
    files: dict[str, Candidate] = {}
    for path, origin in _all_files():
        files.setdefault(os.path.realpath(path), Candidate(str(path), origin, read_build(path)))
    named = [Candidate(name, "dynamic loader (ldconfig, LD_LIBRARY_PATH)") for name in NAMES]
    return [*sorted(files.values(), key=_preference), *named]


def passed_over(candidate: Candidate, chosen: Candidate) -> str:
    """Return the reason why another library was chosen."""
    if not candidate.usable:
        return f"oneDNN {candidate.version}; v3.x is needed"
    if candidate.build.version is None:
        return f"its version cannot be read from the file; {ENV_LIBRARY}={candidate.path} takes it"
    if candidate.rank > chosen.rank:
        return f"{candidate.version} on {candidate.threads}: {_DRAWBACKS[candidate.rank]}"
    return f"{candidate.version}, not newer"


def _preference(candidate: Candidate) -> tuple[bool, int, bool, list[int]]:
    version = candidate.build.version
    return not candidate.usable, candidate.rank, version is None, [-number for number in version or ()]


def explicit_path() -> Candidate | None:
    """Return the library that ``FMTPROP_DNNL_LIBRARY`` names, if it is set."""
    value = os.environ.get(ENV_LIBRARY, "")
    return Candidate(value, f"environment variable {ENV_LIBRARY}") if value else None


def opencl_cpu_driver(library: str) -> str | None:
    """Return ``libintelocl.so`` next to a DPC++ build, or None.

    Result: the value of ``OCL_ICD_FILENAMES`` with which the SYCL runtime finds the CPU as a device.
    """
    directories = [Path(library).parent, Path(os.path.realpath(library)).parent]
    for directory in directories:
        driver = directory / "libintelocl.so"
        if driver.is_file():
            return str(driver)
    return None


def _all_files() -> Iterator[tuple[Path, str]]:
    for distribution, origin in WHEELS.items():
        yield from ((path, origin) for path in _wheel_files(distribution))
    for directory, origin in _directories():
        yield from ((path, origin) for path in _first(directory / name for name in NAMES))


def _directories() -> Iterator[tuple[Path, str]]:
    yield Path(sys.prefix) / "lib", f"Python environment {sys.prefix}"
    for variable in ("CONDA_PREFIX", "DNNLROOT"):
        root = os.environ.get(variable)
        if root:
            yield Path(root) / "lib", f"{variable}={root}"
    oneapi = Path(os.environ.get("ONEAPI_ROOT") or "/opt/intel/oneapi") / "dnnl"
    yield from ((directory, f"oneAPI {oneapi}") for directory in oneapi.glob("*/lib"))
    # The directories of the dynamic loader; the loader itself would load the library.
    searched = [Path(part) for part in os.environ.get("LD_LIBRARY_PATH", "").split(":") if part]
    multiarch = f"lib/{sysconfig.get_config_var('MULTIARCH') or ''}"
    searched += [Path(root) / lib for root in ("/usr/local", "/usr") for lib in (multiarch, "lib64", "lib")]
    yield from ((directory, f"system directory {directory}") for directory in searched)


def _wheel_files(distribution: str) -> Iterator[Path]:
    try:
        files = metadata.distribution(distribution).files or []
    except metadata.PackageNotFoundError:
        return
    found = {file.name: Path(os.path.abspath(str(file.locate()))) for file in files if file.name in NAMES}
    yield from _first(found[name] for name in NAMES if name in found)


def _first(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the first of a directory's names that is a file: all names mean copies of one library."""
    yield from islice((path for path in paths if path.is_file()), 1)
