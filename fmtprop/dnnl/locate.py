"""Where a oneDNN library may be, in order of preference.

Knows packages, directories and environment variables; must not load anything.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ENV_LIBRARY = "FMTPROP_DNNL_LIBRARY"
NAMES = ("libdnnl.so.3", "libdnnl.so")

# Distribution -> what it is. The OpenMP wheel shares PyTorch's thread pool, so it comes first.
WHEELS = {
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


@dataclass(frozen=True)
class Candidate:
    """A file that may be oneDNN.

    Parameters
    ----------
    path : str
        Path of the file, or a bare name that the dynamic loader resolves.
    origin : str
        Which rule found it, for messages.
    """

    path: str
    origin: str


def candidates() -> Iterator[Candidate]:
    """Yield the installed libraries, best first, each file once.

    Yields
    ------
    Candidate
        Files of installed wheels, then a conda environment, a oneAPI installation, and the name that the
        dynamic loader knows. The explicit path (`explicit_path`) is not among them.
    """
    seen: set[str] = set()
    for path, origin in _all_files():
        real = os.path.realpath(path)
        if real not in seen:
            seen.add(real)
            yield Candidate(str(path), origin)
    for name in NAMES:
        yield Candidate(name, "dynamic loader (ldconfig, LD_LIBRARY_PATH)")


def explicit_path() -> Candidate | None:
    """Return the library that ``FMTPROP_DNNL_LIBRARY`` names, if it is set."""
    value = os.environ.get(ENV_LIBRARY, "")
    return Candidate(value, f"environment variable {ENV_LIBRARY}") if value else None


def opencl_cpu_driver(library: str) -> str | None:
    """Return ``libintelocl.so`` next to a DPC++ build, or None.

    Parameters
    ----------
    library : str
        Path of the oneDNN library.

    Returns
    -------
    str or None
        What ``OCL_ICD_FILENAMES`` must hold for the SYCL runtime to see the CPU as a device.
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
    yield from ((path, f"Python environment {sys.prefix}") for path in _in_directory(Path(sys.prefix) / "lib"))
    for variable, below in (("CONDA_PREFIX", "lib"), ("DNNLROOT", "lib")):
        root = os.environ.get(variable)
        if root:
            yield from ((path, f"{variable}={root}") for path in _in_directory(Path(root) / below))
    oneapi = Path(os.environ.get("ONEAPI_ROOT") or "/opt/intel/oneapi") / "dnnl"
    for directory in sorted(oneapi.glob("*/lib"), reverse=True):
        yield from ((path, f"oneAPI {oneapi}") for path in _in_directory(directory))


def _in_directory(directory: Path) -> Iterator[Path]:
    yield from (directory / name for name in NAMES if (directory / name).is_file())


def _wheel_files(distribution: str) -> Iterator[Path]:
    try:
        files = metadata.distribution(distribution).files
    except metadata.PackageNotFoundError:
        return
    for name in NAMES:
        for file in files or ():
            if file.name == name:
                path = Path(os.path.abspath(str(file.locate())))
                if path.is_file():
                    yield path
