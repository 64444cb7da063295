from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fmtprop import dnnl
from fmtprop.dnnl import library as library_module
from fmtprop.dnnl.locate import Candidate, candidates, explicit_path, opencl_cpu_driver
from fmtprop.errors import DnnlError, LibraryError, LoadError


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env)


def test_loaded_once_and_described() -> None:
    library = dnnl.load()
    assert library is dnnl.load() is dnnl.lib() is dnnl.load(library.path)
    assert library.version >= (3, 0, 0)
    assert len(library.hash) == 40
    assert library.runtime in ("OMP", "SYCL", "TBB", "SEQ", "THREADPOOL")
    assert library.isa
    assert library.threads >= 1
    assert library.has("dnnl_engine_create") and library.has("engine_create") and not library.has("nonsense")


@pytest.mark.parametrize(
    ("number", "included", "lanes"),
    [
        (0x1, [], 8),  # SSE4.1
        (0x7, ["avx2"], 8),
        (0x27, ["avx2", "avx512_core"], 16),
        (0xFEF, ["avx2", "avx512_core", "avx512_core_bf16"], 16),  # AMX
        (0x201FF, ["avx2", "avx512_core", "avx512_core_bf16"], 16),  # AVX10.2
    ],
)
def test_instruction_sets_include_others(
    number: int, included: list[str], lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = dnnl.load()
    monkeypatch.setitem(vars(library), "get_effective_cpu_isa", lambda: number)
    assert [isa for isa in ("avx2", "avx512_core", "avx512_core_bf16") if library.includes(isa)] == included
    assert library.lanes == lanes


def test_import_loads_nothing() -> None:
    code = "import sys; from fmtprop import dnnl; assert dnnl.loaded() is None; assert 'torch' not in sys.modules"
    result = run_python(code)
    assert result.returncode == 0, result.stderr


# Libraries that cannot be loaded need no PyTorch first, which takes seconds.
REFUSED = """
import sys
sys.modules["torch"] = None
from fmtprop import dnnl, errors
try:
    dnnl.load()
except errors.LoadError as error:
    print(error)
"""


def test_environment_variable_wins() -> None:
    code = "from fmtprop import dnnl; library = dnnl.load(); print(library.origin, library.isa)"
    result = run_python(code, FMTPROP_DNNL_LIBRARY=dnnl.lib().path, ONEDNN_MAX_CPU_ISA="SSE41")
    assert result.stdout.split() == ["environment", "variable", "FMTPROP_DNNL_LIBRARY", "sse41"], result.stderr


def test_errors_say_what_was_tried() -> None:
    result = run_python(REFUSED, FMTPROP_DNNL_LIBRARY="/nowhere/libdnnl.so.3")
    assert "/nowhere/libdnnl.so.3 [environment variable FMTPROP_DNNL_LIBRARY]" in result.stdout, result.stderr
    assert "pip install onednn-cpu-gomp" in result.stdout


def test_a_library_that_is_not_onednn_is_rejected(tmp_path: Path) -> None:
    import _ctypes

    other = tmp_path / "libdnnl.so.3"
    shutil.copy(_ctypes.__file__, other)
    result = run_python(REFUSED, FMTPROP_DNNL_LIBRARY=str(other))
    assert "no symbol dnnl_version" in result.stdout, result.stderr


def test_a_second_library_is_refused() -> None:
    with pytest.raises(LoadError, match=r"already uses oneDNN from .*start a new process"):
        dnnl.load("/somewhere/else/libdnnl.so.3")


def test_missing_function_names_version_and_remedy() -> None:
    with pytest.raises(LibraryError, match=r"dnnl_from_the_future is not in oneDNN .*fmtprop doctor"):
        _ = dnnl.lib().from_the_future


def test_raise_status() -> None:
    dnnl.raise_status("dnnl_anything", 0)
    with pytest.raises(DnnlError, match=r"dnnl_anything answered unimplemented: because") as info:
        dnnl.raise_status("dnnl_anything", 3, "because")
    assert (info.value.function, info.value.status) == ("dnnl_anything", "unimplemented")
    with pytest.raises(DnnlError, match=r"status 999"):
        dnnl.raise_status("dnnl_anything", 999)


def test_candidates_are_files_or_names_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(candidates())
    paths = [candidate.path for candidate in found]
    assert len(set(paths)) == len(paths) > 0
    assert all(Path(path).is_file() or os.sep not in path for path in paths)
    monkeypatch.setenv("FMTPROP_DNNL_LIBRARY", "/x/libdnnl.so")
    explicit = explicit_path()
    assert explicit is not None and explicit.path == "/x/libdnnl.so"
    monkeypatch.delenv("FMTPROP_DNNL_LIBRARY")
    assert explicit_path() is None


@pytest.mark.parametrize("variable", ["CONDA_PREFIX", "DNNLROOT", "ONEAPI_ROOT"])
def test_other_installations_are_found(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / ("dnnl/2025.1/lib" if variable == "ONEAPI_ROOT" else "lib")
    directory.mkdir(parents=True)
    (directory / "libdnnl.so.3").write_bytes(b"")
    monkeypatch.setenv(variable, str(tmp_path))
    assert str(directory / "libdnnl.so.3") in [candidate.path for candidate in candidates()]


def test_opencl_driver_beside_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libdnnl.so.3"
    assert opencl_cpu_driver(str(library)) is None
    (tmp_path / "libintelocl.so").write_bytes(b"")
    assert opencl_cpu_driver(str(library)) == str(tmp_path / "libintelocl.so")
    # A library that turns out not to need it leaves the environment as it was.
    monkeypatch.delenv("OCL_ICD_FILENAMES", raising=False)
    library.write_bytes(b"not a library")
    with pytest.raises(LoadError, match=r"libdnnl.so.3"):
        library_module.load_first([Candidate(str(library), "test")])
    assert "OCL_ICD_FILENAMES" not in os.environ


def test_neighbours_are_found_without_a_run_path(tmp_path: Path) -> None:
    """Wheels put a library's runtimes beside it; the loader alone would not find them."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    (tmp_path / "inner.c").write_text("int inner(void) { return 41; }\n")
    (tmp_path / "outer.c").write_text("int inner(void);\nint outer(void) { return inner() + 1; }\n")
    shared = [compiler, "-shared", "-fPIC"]
    subprocess.run(
        [*shared, "inner.c", "-o", "libinner_x.so.1", "-Wl,-soname,libinner_x.so.1"], cwd=tmp_path, check=True
    )
    subprocess.run([*shared, "outer.c", "-o", "libouter_x.so", "-l:libinner_x.so.1", "-L."], cwd=tmp_path, check=True)
    assert library_module.open_with_neighbours(str(tmp_path / "libouter_x.so")).outer() == 42
