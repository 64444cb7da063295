"""Diagnosis of the oneDNN libraries: found, chosen and missing ones, and advice.

Owns the facts behind ``fmtprop doctor``; prints nothing.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from fmtprop.dnnl.capability import supports
from fmtprop.dnnl.library import Library, load, rejections
from fmtprop.dnnl.locate import ENV_LIBRARY, INSTALL_HINT, NEWER, NEWER_HINT, candidates, passed_over
from fmtprop.errors import LoadError
from fmtprop.system.machine import cpu_model

DATA_TYPES = ("f32", "bf16", "f16", "s8")
VARIABLES = (
    ENV_LIBRARY,
    "ONEDNN_MAX_CPU_ISA",
    "ONEDNN_VERBOSE",
    "OCL_ICD_FILENAMES",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
    "KMP_BLOCKTIME",
)


@dataclass(frozen=True)
class Finding:
    """One library file."""

    path: str
    origin: str
    #: ``"chosen"``, ``"rejected"`` or ``"not tried"``
    state: str
    reason: str


@dataclass(frozen=True)
class Diagnosis:
    """Everything that ``fmtprop doctor`` reports."""

    findings: tuple[Finding, ...]
    #: the reason why no library could be loaded; empty if one was loaded
    error: str = ""
    #: `version`, `hash`, `runtime`, `isa`: properties of the chosen library; empty without one
    version: str = ""
    hash: str = ""
    runtime: str = ""
    isa: str = ""
    #: `threads`, `cpus`: OpenMP threads of a parallel region of this thread, and CPUs that this process may use
    threads: int = 0
    cpus: int = 0
    cpu: str = ""
    #: whether oneDNN has optimized kernels for each data type on this CPU
    data_types: dict[str, bool] = field(default_factory=dict)
    torch: str = ""
    #: 0 without PyTorch
    torch_threads: int = 0
    #: OpenMP runtimes in this process
    openmp: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    advice: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether oneDNN can be used."""
        return not self.error

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-ready data."""
        return asdict(self)

    def to_text(self) -> str:
        """Return the report that the command prints."""
        rows = [("CPU", f"{self.cpu} ({self.cpus} usable)")]
        if self.ok:
            chosen = next(finding for finding in self.findings if finding.state == "chosen")
            rows += [
                ("oneDNN", f"v{self.version} ({self.runtime}), commit {self.hash[:12]}"),
                ("library", f"{chosen.path} [{chosen.origin}]: {chosen.reason}"),
                ("instruction set", self.isa),
                ("threads", str(self.threads)),
                ("data types", ", ".join(f"{n} {'yes' if ok else 'no'}" for n, ok in self.data_types.items())),
            ]
        else:
            rows.append(("oneDNN", "not usable"))
        threads = f", {self.torch_threads} threads" if self.torch_threads else ""
        rows.append(("PyTorch", self.torch + threads))
        rows += [("OpenMP runtime", path) for path in self.openmp]
        rows += [("environment", f"{name}={value}") for name, value in self.environment.items()]
        for finding in self.findings:
            if finding.state != "chosen":
                rows.append((finding.state, f"{finding.path} [{finding.origin}]: {finding.reason}"))
        rows += [("advice", text) for text in self.advice]
        return "\n".join(f"{name:<16} {value}" for name, value in rows)


def diagnose() -> Diagnosis:
    """Load oneDNN and collect everything that decides whether it runs here, and how fast.

    >>> from fmtprop.dnnl import doctor
    >>> doctor.diagnose().data_types["f32"]
    True
    """
    cpus = len(os.sched_getaffinity(0))
    environment = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    try:
        library = load()
    except LoadError as error:
        torch, threads = _torch()
        return Diagnosis(
            findings=tuple(Finding(r.candidate.path, r.candidate.origin, "rejected", r.reason) for r in rejections()),
            error=str(error),
            cpus=cpus,
            cpu=cpu_model(),
            torch=torch,
            torch_threads=threads,
            environment=environment,
            advice=(INSTALL_HINT, *_without_library()),
        )
    torch, threads = _torch(library)
    data_types = {name: supports(name) for name in DATA_TYPES}
    openmp = _openmp_runtimes()
    return Diagnosis(
        findings=findings_of(library),
        version=".".join(map(str, library.version)),
        hash=library.hash,
        runtime=library.runtime,
        isa=library.isa,
        threads=library.threads,
        cpus=cpus,
        cpu=cpu_model(),
        data_types=data_types,
        torch=torch,
        torch_threads=threads,
        openmp=openmp,
        environment=environment,
        advice=advice_for(library, threads, data_types, openmp, cpus),
    )


def _without_library() -> tuple[str, ...]:
    """Return advice for a process without a library."""
    if importlib.util.find_spec("torch") is None:
        return ()
    return (
        "until then fp.compile falls back, with a warning, to the oneDNN inside PyTorch (target='mkldnn'): slower, but "
        "it needs nothing else",
    )


def findings_of(library: Library) -> tuple[Finding, ...]:
    """Return all libraries of this machine: those that were rejected, the loaded one, and those that were not tried."""
    rejected = [Finding(r.candidate.path, r.candidate.origin, "rejected", r.reason) for r in library.rejected]
    found = [candidate for candidate in candidates() if os.path.isfile(candidate.path)]
    chosen = next((one for one in found if (one.path, one.origin) == (library.path, library.origin)), None)
    why = f"the newest on {chosen.threads}" if chosen is not None else "asked for by name"
    known = {finding.path for finding in rejected} | {library.path}
    others = [
        Finding(one.path, one.origin, "not tried", passed_over(one, chosen) if chosen else "another was asked for")
        for one in found
        if one.path not in known
    ]
    return (*rejected, Finding(library.path, library.origin, "chosen", why), *others)


def _torch(library: Library | None = None) -> tuple[str, int]:
    module = sys.modules.get("torch")
    if module is not None:
        return str(module.__version__), int(module.get_num_threads())
    return (library.torch if library is not None else "not installed"), 0


def _openmp_runtimes() -> tuple[str, ...]:
    """Return the OpenMP runtimes that are mapped into this process; two of them compete for the cores."""
    try:
        with open("/proc/self/maps") as file:
            paths = {line.split()[-1] for line in file if re.search(r"/lib(gomp|iomp5|omp)\b[^/]*\.so", line)}
    except OSError:
        return ()
    return tuple(sorted(paths))


def advice_for(
    library: Library, torch_threads: int, data_types: dict[str, bool], openmp: tuple[str, ...], cpus: int
) -> tuple[str, ...]:
    """Return advice for a user of a library."""
    advice = []
    if not torch_threads:
        advice.append(f"PyTorch {library.torch}: fp.from_torch and the reference target need it (pip install torch)")
    if not data_types["bf16"]:
        advice.append(f'no bf16 kernels on this CPU ({library.isa}): dtype="bf16" needs AVX512-BF16 or AVX2-VNNI-2')
    if library.version < NEWER and platform.machine() == "x86_64":
        advice.append(NEWER_HINT)
    if library.runtime == "SYCL":
        advice.append("this build submits through SYCL, about 8 µs more per primitive than the OpenMP wheel")
    if len(openmp) > 1:
        advice.append("more than one OpenMP runtime is loaded: their threads compete for the cores; load one only")
    if library.runtime == "OMP" and library.threads > cpus:
        advice.append(f"{library.threads} threads on {cpus} usable CPUs: set OMP_NUM_THREADS={cpus}")
    if library.runtime == "OMP" and not os.environ.get("OMP_WAIT_POLICY") and not os.environ.get("GOMP_SPINCOUNT"):
        advice.append(
            "OpenMP threads spin while they wait: if other processes use these CPUs, set OMP_WAIT_POLICY=passive"
        )
    if torch_threads and library.runtime == "OMP" and torch_threads != library.threads:
        advice.append(
            f"PyTorch uses {torch_threads} threads and oneDNN {library.threads}: import torch first, "
            "so that both share one OpenMP runtime"
        )
    return tuple(advice)
