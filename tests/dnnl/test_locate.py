"""Which library is taken: by its threads, then the newest, read from files that are not loaded."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from fmtprop import dnnl
from fmtprop.dnnl import doctor, library, locate
from fmtprop.dnnl.library import Library
from fmtprop.dnnl.locate import Build, Candidate, candidates, passed_over, read_build
from fmtprop.errors import LoadError
from tests.dnnl.fake_library import write_library

GNU, INTEL = "libgomp.so.1", "libiomp5.so"


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder where a wheel, conda, oneAPI and the system may have a library, and nothing else has."""
    for variable in ("FMTPROP_DNNL_LIBRARY", "DNNLROOT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("CONDA_PREFIX", str(tmp_path / "conda"))
    monkeypatch.setenv("ONEAPI_ROOT", str(tmp_path / "oneapi"))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "system"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    return tmp_path


def install_wheel(site: Path, name: str, file: str, version: tuple[int, int, int], *needs: str) -> Path:
    path = write_library(site / file, version, *needs)
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "RECORD").write_text(f"{file},,\n")
    return path


def found(places: Path) -> list[Path]:
    """Return what was found below a folder, best first."""
    return [Path(one.path) for one in candidates() if one.path.startswith(str(places))]


def test_a_file_tells_version_and_threads(tmp_path: Path) -> None:
    path = write_library(tmp_path / "libdnnl.so.3", (3, 6, 2), "libm.so.6", GNU)
    assert read_build(path) == Build((3, 6, 2), frozenset({"libm.so.6", GNU}))
    other = write_library(tmp_path / "other.so", (3, 6, 2), GNU, function="cblas_version")
    assert read_build(other) == Build(None, frozenset({GNU}))


def test_the_loaded_library_tells_its_version() -> None:
    loaded = dnnl.lib()
    assert read_build(loaded.path).version == loaded.version


def test_a_full_name_tells_the_version_where_the_code_does_not(tmp_path: Path) -> None:
    (tmp_path / "libdnnl.so.3.9").write_bytes(b"of another machine")
    (tmp_path / "libdnnl.so.3").symlink_to("libdnnl.so.3.9")
    assert read_build(tmp_path / "libdnnl.so.3").version == (3, 9)
    write_library(tmp_path / "libdnnl.so.3.9", (-1, 6, 2))
    assert read_build(tmp_path / "libdnnl.so.3").version == (3, 9)


def test_damaged_files_tell_nothing_and_raise_nothing(tmp_path: Path) -> None:
    path = write_library(tmp_path / "libdnnl.so.3", (3, 6, 2), GNU)
    good, drawn = path.read_bytes(), random.Random(0)
    for size in range(0, len(good), 7):
        path.write_bytes(good[:size])
        assert read_build(path).version in (None, (3, 6, 2))
    for _ in range(500):
        bad = bytearray(good)
        for _ in range(4):
            bad[drawn.randrange(len(bad))] = drawn.randrange(256)
        path.write_bytes(bad)
        read_build(path)
    assert read_build(tmp_path / "absent") == read_build(tmp_path) == Build()


def test_the_newest_comes_first_wherever_it_is(places: Path) -> None:
    old = install_wheel(places / "site", "onednn-cpu-gomp", "lib/libdnnl.so.3", (3, 2, 0), GNU)
    new = install_wheel(places / "site", "paddlepaddle", "paddle/libs/libdnnl.so.3", (3, 6, 2), GNU)
    assert found(places) == [new, old]
    newer = write_library(places / "conda/lib/libdnnl.so.3", (3, 10, 0), GNU)
    system = write_library(places / "system/libdnnl.so", (3, 7, 1), GNU)
    oneapi = [write_library(places / f"oneapi/dnnl/{v}/lib/libdnnl.so.3", (3, v, 0), GNU) for v in (5, 8)]
    assert found(places) == [newer, oneapi[1], system, new, oneapi[0], old]


def test_threads_come_before_versions_and_what_is_no_v3_is_last(places: Path) -> None:
    sycl = install_wheel(places / "site", "onednn", "lib/libdnnl.so.3", (3, 13, 2), "libsycl.so.9", "libtbb.so.12")
    intel = install_wheel(places / "site", "onednn-cpu-iomp", "iomp/libdnnl.so.3", (3, 9, 0), INTEL)
    gnu = install_wheel(places / "site", "onednn-cpu-gomp", "gomp/libdnnl.so.3", (3, 2, 0), GNU)
    unknown = write_library(places / "conda/lib/libdnnl.so.3", (3, 14, 0), GNU, function="none")
    future = write_library(places / "system/libdnnl.so", (4, 0, 0), GNU)
    assert found(places) == [gnu, unknown, intel, sycl, future]
    chosen, *others = candidates()[:5]
    assert [passed_over(other, chosen) for other in others] == [
        f"its version cannot be read from the file; FMTPROP_DNNL_LIBRARY={unknown} takes it",
        "v3.9.0 on threads of its own: they compete with PyTorch's for the cores",
        "v3.13.2 on SYCL: 8 µs more per primitive",
        "oneDNN v4.0.0; v3.x is needed",
    ]
    assert passed_over(chosen, chosen) == "v3.2.0, not newer"


def test_copies_beside_each_other_are_one_library(places: Path) -> None:
    first = write_library(places / "conda/lib/libdnnl.so.3", (3, 4, 0), GNU)
    write_library(places / "conda/lib/libdnnl.so", (3, 4, 0), GNU)
    assert found(places) == [first]


def test_what_cannot_be_loaded_is_passed_over_with_the_reason(places: Path) -> None:
    broken = write_library(places / "conda/lib/libdnnl.so.3", (3, 99, 0), GNU)
    future = write_library(places / "system/libdnnl.so", (4, 0, 0), GNU)
    real = dnnl.lib()
    works = Candidate(real.path, "this process's own", read_build(real.path))
    taken = library.load_first([*candidates()[:2], works])
    assert taken.path == real.path
    assert [(one.candidate.path, one.reason) for one in taken.rejected][1:] == [
        (str(future), "oneDNN v4.0.0; v3.x is needed")
    ]
    assert taken.rejected[0].candidate.path == str(broken) and taken.rejected[0].reason
    with pytest.raises(LoadError, match=r"libdnnl.so.3 \[CONDA_PREFIX=.*\]: .*\n.*v4.0.0; v3.x is needed"):
        library.load_first(candidates()[:2])


def test_doctor_says_why_each_was_or_was_not_taken(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = install_wheel(places / "site", "onednn-cpu-gomp", "lib/libdnnl.so.3", (3, 2, 0), GNU)
    new = install_wheel(places / "site", "paddlepaddle", "paddle/libs/libdnnl.so.3", (3, 6, 2), GNU)
    best = candidates()[0]
    loaded = Library(best.path, best.origin, (3, 6, 2), "0" * 40, "OMP", (), "2.13", None)  # type: ignore[arg-type]
    chosen, other = doctor.findings_of(loaded)[:2]
    assert (chosen.path, chosen.state, chosen.reason) == (str(new), "chosen", "the newest on GNU OpenMP")
    assert (other.path, other.state, other.reason) == (str(old), "not tried", "v3.2.0, not newer")
    named = Library(str(old), "explicit path", (3, 2, 0), "0" * 40, "OMP", (), "2.13", None)  # type: ignore[arg-type]
    chosen, other = doctor.findings_of(named)[:2]
    assert (chosen.path, chosen.reason) == (str(old), "asked for by name")
    assert (other.path, other.reason) == (str(new), "another was asked for")


def test_a_newer_library_is_advised_where_there_is_an_older_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")

    class Fake:
        runtime, threads, isa, torch, version = "OMP", 2, "avx2", "2.13", (3, 2, 0)

    def advice() -> str:
        return "\n".join(doctor.advice_for(Fake(), 2, {"bf16": True}, (), 2))  # type: ignore[arg-type]

    assert locate.NEWER_HINT in advice() and "pip install fmtprop[newest]" in advice()
    Fake.version = locate.NEWER
    assert locate.NEWER_HINT not in advice()
