"""Loading oneDNN: once per process, any v3.x, with signatures from the generated table.

Owns the loaded library and the translation of status codes to errors; must not know any primitive.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import re
from collections.abc import Sequence
from ctypes import c_int
from dataclasses import dataclass, field
from typing import Any

from fmtprop.dnnl import _abi
from fmtprop.dnnl.locate import INSTALL_HINT, Candidate, candidates, explicit_path, opencl_cpu_driver
from fmtprop.errors import DnnlError, LibraryError, LoadError
from fmtprop.system.locks import ProcessLock

OPENCL_DRIVERS = "OCL_ICD_FILENAMES"

_STATUS = {number: name for name, number in _abi.ENUMS["dnnl_status_t"].items()}
_ISA = {number: name.removeprefix("cpu_isa_") for name, number in _abi.ENUMS["dnnl_cpu_isa_t"].items()}
#: instruction sets as ``ONEDNN_MAX_CPU_ISA`` names them, in lower case; oneDNN ignores any other name
ISA_NAMES = tuple(name.removeprefix("cpu_isa_") for name in _abi.ENUMS["dnnl_cpu_isa_t"])
_RUNTIME = {number: name for name, number in _abi.RUNTIMES.items() if name != "DPCPP"}
_MISSING = re.compile(r"(\S+): cannot open shared object file")
_CPU_ENGINE = _abi.ENUMS["dnnl_engine_kind_t"]["cpu"]


@dataclass(frozen=True)
class Rejection:
    """A library file that was rejected."""

    candidate: Candidate
    reason: str


@dataclass(frozen=True, eq=False)
class Library:
    """The loaded oneDNN library.

    C functions are attributes without their ``dnnl_`` prefix, such as ``library.engine_create``, with ``argtypes`` and
    ``restype``. A function that this version lacks raises `LibraryError` on access.
    """

    #: the file (or the name that the dynamic loader resolved)
    path: str
    origin: str
    #: (major, minor, patch)
    version: tuple[int, int, int]
    hash: str
    #: CPU threading runtime: ``"OMP"``, ``"SYCL"``, ``"TBB"``, ``"SEQ"`` or ``"THREADPOOL"``
    runtime: str
    rejected: tuple[Rejection, ...]
    #: version of PyTorch, which was imported first, or the reason why it was not imported
    torch: str
    _cdll: ctypes.CDLL = field(repr=False)

    @property
    def isa(self) -> str:
        """Instruction set that oneDNN uses here, such as ``"avx2"``; ``ONEDNN_MAX_CPU_ISA`` lowers it."""
        number = self.get_effective_cpu_isa()
        return _ISA.get(number, f"isa_{number:#x}")

    def includes(self, isa: str) -> bool:
        """Return whether the instruction set that oneDNN uses here includes another, such as ``"avx512_core"``.

        Names do not tell: AVX10.2 includes AVX-512 and bf16.
        """
        wanted: int = _abi.ENUMS["dnnl_cpu_isa_t"][f"cpu_isa_{isa}"]
        return int(self.get_effective_cpu_isa()) & wanted == wanted

    @property
    def lanes(self) -> int:
        """Elements of f32 in the vectors of this instruction set."""
        return 16 if self.includes("avx512_core") else 8

    @property
    def has_tiles(self) -> bool:
        """Whether this instruction set multiplies matrices (AMX)."""
        return self.includes("avx512_core_amx")

    def has(self, symbol: str) -> bool:
        """Return whether this version has a function.

        `symbol`: name with or without the ``dnnl_`` prefix.
        """
        return hasattr(self._cdll, "dnnl_" + symbol.removeprefix("dnnl_"))

    def __getattr__(self, name: str) -> Any:
        # Called once per function: the bound function becomes an attribute.
        if name.startswith("__"):
            raise AttributeError(name)
        function = _bind(self._cdll, "dnnl_" + name)
        if function is None:
            raise LibraryError(
                f"dnnl_{name} is not in oneDNN {'.'.join(map(str, self.version))} ({self.path}); "
                "load a newer oneDNN (see `fmtprop doctor`)"
            )
        self.__dict__[name] = function
        return function

    def runtime_function(self, name: str) -> Any | None:
        """Return a function of the threading runtime that oneDNN was linked to, or None.

        `name`: C name, such as ``"omp_get_max_threads"``.
        """
        return getattr(self._cdll, name, None)

    @property
    def handle(self) -> int:
        """The dynamic loader's handle of the library."""
        return int(self._cdll._handle)

    @property
    def threads(self) -> int:
        """Number of threads that a primitive created now by this thread will use."""
        function = self.runtime_function("omp_get_max_threads") if self.runtime == "OMP" else None
        if function is not None:
            return int(function())
        return 1 if self.runtime == "SEQ" else len(os.sched_getaffinity(0))

    def set_threads(self, count: int) -> None:
        """Set the number of threads that the calling thread's parallel regions use.

        A primitive must be executed with the number of threads that it was created with. A new thread does not inherit
        the number: call this there before executing. No effect without OpenMP.
        """
        function = self.runtime_function("omp_set_num_threads") if self.runtime == "OMP" else None
        if function is not None:
            function(ctypes.c_int(max(1, count)))


_lock = ProcessLock()
_loaded: Library | None = None
_rejections: tuple[Rejection, ...] = ()


def load(path: str | os.PathLike[str] | None = None) -> Library:
    """Find and load oneDNN, once per process.

    `path`: the library file. Default: the environment variable ``FMTPROP_DNNL_LIBRARY``, else the first usable file of
    `fmtprop.dnnl.locate.candidates`: the newest of wheels, conda, oneAPI and the system.

    PyTorch, if installed, is imported first: then both share one OpenMP runtime and thread pool, and
    ``torch.set_num_threads`` governs both.

    >>> from fmtprop import dnnl
    >>> dnnl.load().version[0]
    3
    """
    global _loaded
    with _lock.current:
        if _loaded is None:
            _loaded = load_first(_wanted(path))
        elif path is not None and os.path.realpath(path) != os.path.realpath(_loaded.path):
            raise LoadError(
                f"cannot load {os.fspath(path)}: this process already uses oneDNN from {_loaded.path}; "
                "start a new process for another library"
            )
        return _loaded


def lib() -> Library:
    """Return the loaded library; loads it on first use."""
    return _loaded if _loaded is not None else load()


def loaded() -> Library | None:
    """Return the library if this process has loaded it; never loads."""
    return _loaded


def rejections() -> tuple[Rejection, ...]:
    """Return the files that the last attempt to load rejected."""
    return _rejections


def status_name(status: int) -> str:
    """Return the name of a ``dnnl_status_t`` value, such as ``"unimplemented"``."""
    return _STATUS.get(status, f"status {status}")


def raise_status(function: str, status: int, details: str = "", repro: str = "") -> None:
    """Raise `DnnlError` if a oneDNN call failed."""
    if status:
        raise DnnlError(function, status_name(status), details, repro)


def bare_execute() -> Any:
    """Return ``dnnl_primitive_execute`` as a function object without ``argtypes``, for the hot loop.

    Result: ``(primitive, stream, c_int(count), array) -> int status``; the pointers must be ctypes objects made once.
    Converting through ``argtypes`` would cost more than the call.
    """
    function = lib()._cdll["dnnl_primitive_execute"]
    function.restype = c_int
    return function


def _wanted(path: str | os.PathLike[str] | None) -> list[Candidate]:
    if path is not None:
        return [Candidate(os.fspath(path), "explicit path")]
    explicit = explicit_path()
    return [explicit] if explicit else candidates()


def load_first(wanted: list[Candidate]) -> Library:
    """Return the first of some libraries that can be used."""
    global _rejections
    torch = _import_torch()
    rejected: list[Rejection] = []
    for candidate in wanted:
        outcome = _try_load(candidate, tuple(rejected), torch)
        if isinstance(outcome, Library):
            return outcome
        rejected.append(Rejection(candidate, outcome))
        _rejections = tuple(rejected)
    tried = "".join(f"\n  {r.candidate.path} [{r.candidate.origin}]: {r.reason}" for r in rejected)
    raise LoadError(f"no usable oneDNN v3 library; tried:{tried}\n{INSTALL_HINT}")


def _import_torch() -> str:
    if importlib.util.find_spec("torch") is None:
        return "not installed"
    try:
        return str(importlib.import_module("torch").__version__)
    except (ImportError, OSError) as error:
        return f"cannot be imported: {error}"


def _try_load(candidate: Candidate, rejected: tuple[Rejection, ...], torch: str) -> Library | str:
    """Return the library, or the reason why this file is not usable."""
    if not candidate.usable:  # checked before loading: a second oneDNN in the process may break both
        return _other_version(candidate.build.version or ())
    driver = opencl_cpu_driver(candidate.path)
    set_driver = driver is not None and not os.environ.get(OPENCL_DRIVERS)
    if driver is not None and set_driver:
        os.environ[OPENCL_DRIVERS] = driver
    library = _open(candidate, rejected, torch)
    if set_driver and (isinstance(library, str) or library.runtime != "SYCL"):
        del os.environ[OPENCL_DRIVERS]
    return library


def _open(candidate: Candidate, rejected: tuple[Rejection, ...], torch: str) -> Library | str:
    try:
        cdll = open_with_neighbours(candidate.path)
    except OSError as error:
        return str(error)
    version_function = _bind(cdll, "dnnl_version")
    if version_function is None:
        return "not oneDNN: it has no symbol dnnl_version"
    version = version_function().contents
    numbers = (version.major, version.minor, version.patch)
    if version.major != 3:
        return _other_version(numbers)
    count = _bind(cdll, "dnnl_engine_get_count")
    if count is None or count(_CPU_ENGINE) == 0:
        return (
            f"oneDNN v{'.'.join(map(str, numbers))} offers no CPU engine here "
            f"(a DPC++ build needs an OpenCL CPU driver: {OPENCL_DRIVERS})"
        )
    runtime = _RUNTIME.get(version.cpu_runtime, f"runtime {version.cpu_runtime}")
    return Library(candidate.path, candidate.origin, numbers, version.hash.decode(), runtime, rejected, torch, cdll)


def _other_version(version: Sequence[int]) -> str:
    return f"oneDNN v{'.'.join(map(str, version))}; v3.x is needed"


def open_with_neighbours(path: str) -> ctypes.CDLL:
    """Open a library; search its own directory for dependencies that the loader does not find.

    Wheels put a library and its runtimes into the same directory of an environment, without a run path.
    """
    while True:
        try:
            return ctypes.CDLL(path)
        except OSError as error:
            missing = _MISSING.match(str(error))
            neighbour = os.path.join(os.path.dirname(path), missing.group(1)) if missing else path
            if neighbour == path or not os.path.isfile(neighbour):
                raise
            # From now on the loader finds it by its name, so the next attempt gets further.
            open_with_neighbours(neighbour)


def _bind(cdll: ctypes.CDLL, name: str) -> Any | None:
    signature = _abi.FUNCTIONS.get(name)
    if signature is None and name == "dnnl_memory_desc_create_with_string_tag":
        signature = _STRING_TAG
    function = getattr(cdll, name, None)
    if function is None or signature is None:
        return None
    function.restype, function.argtypes = signature
    return function


# Every v3 library exports it, but no header declares it.
_STRING_TAG = (
    c_int,
    (
        ctypes.POINTER(_abi.dnnl_memory_desc_t),
        c_int,
        ctypes.POINTER(ctypes.c_int64),
        c_int,
        ctypes.c_char_p,
    ),
)
