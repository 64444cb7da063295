"""Files that ask for what no model may: one ImportModelError for each, soon and in little memory."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from fmtprop.errors import ImportModelError
from fmtprop.onnx.model import from_onnx
from tests.onnx import fuzz, fuzz_external, hostile

MOST_SECONDS = 10
MOST_MEGABYTES = 1000


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    from_onnx(hostile.model())  # what is loaded once
    return {path.stem: path for path in hostile.make(tmp_path_factory.mktemp("hostile"))}


#: seeds of :mod:`tests.onnx.fuzz` that ended in another error than ImportModelError once: an attribute that
#: refers to a function's where there is none, a product of a scalar, an operator whose name is no text
SEEDS = [158, 204, 1213, 1355, 2230]

NAMES = [f"{kind.__name__}_{name}" for kind in hostile.CLASSES for name, _ in kind()]


def test_there_are_enough():
    assert len(set(NAMES)) == len(NAMES) >= 100


@pytest.mark.parametrize("name", NAMES)
def test_is_refused(files, name):
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(ImportModelError) as caught:
        from_onnx(files[name])
    assert time.process_time() - start < MOST_SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_MEGABYTES * 1024
    assert len(str(caught.value)) > 20
    assert "root:" not in str(caught.value)  # nothing of a foreign file


def test_a_small_file_takes_little_memory(tmp_path):
    (tmp_path / "small.onnx").write_bytes(hostile.model().SerializeToString())
    tracemalloc.start()
    from_onnx(tmp_path / "small.onnx")
    assert tracemalloc.get_traced_memory()[1] < 2**23
    tracemalloc.stop()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_damaged_model_is_refused(seed):
    assert fuzz.check(seed) == "refused"


def test_external_data_that_lie(tmp_path):
    home = fuzz_external.folder(tmp_path)
    ends = [fuzz_external.check(seed, home) for seed in range(30)]
    assert set(ends) == {"graph", "refused"}


def test_a_hard_link_may_lead_anywhere(tmp_path):
    home = fuzz_external.folder(tmp_path)
    linked = fuzz_external.model()
    linked.graph.initializer[0].external_data[0].value = "hard"
    (home / "hard.onnx").write_bytes(linked.SerializeToString())
    with pytest.raises(ImportModelError, match=r"'hard' has 2 names \(hard links\).* put a copy of it there"):
        from_onnx(home / "hard.onnx")
    (tmp_path / "secret").unlink()
    from_onnx(home / "hard.onnx")


def test_external_data_of_holes_and_of_overlaps(tmp_path):
    """A small file must not fill the memory: with holes, or read again and again."""
    home = fuzz_external.folder(tmp_path)
    holes = fuzz_external.model()
    tensor = holes.graph.initializer[0]
    del tensor.external_data[1:]
    tensor.external_data[0].value = "hole"
    del tensor.dims[:]
    tensor.dims.append(1 << 29)
    (home / "model.onnx").write_bytes(holes.SerializeToString())
    with pytest.raises(ImportModelError, match=r"'hole' has 1099511627776 bytes, of which only 0 are on the disk"):
        from_onnx(home / "model.onnx")
    (home / "zeros").write_bytes(bytes(1 << 25))
    overlaps = fuzz_external.model()
    for index in range(20):
        tensor = overlaps.graph.initializer.add(
            name=f"w{index}", data_type=1, dims=[(1 << 23) - index], data_location=1
        )
        tensor.external_data.add(key="location", value="zeros")
        tensor.external_data.add(key="offset", value=str(4 * index))
    (home / "model.onnx").write_bytes(overlaps.SerializeToString())
    with pytest.raises(
        ImportModelError, match=r"initialiser w4.* take .* bytes of files with .*: they overlap too much"
    ):
        from_onnx(home / "model.onnx")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "seeds"), [("fuzz", "0:2000"), ("fuzz", "1000000:1001000"), ("fuzz_external", "0:2000")]
)
def test_damaged_models(module, seeds):
    """In a process of its own, which a crash would end."""
    command = [sys.executable, "-m", f"tests.onnx.{module}", seeds]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
