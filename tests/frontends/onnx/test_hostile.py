"""Files that ask for what no model may: one ImportModelError for each, soon and in little memory."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fmtprop.errors import ImportModelError
from fmtprop.frontends.onnx import from_onnx
from tests.frontends.onnx import fuzz, hostile

MOST_SECONDS = 10
MOST_MEGABYTES = 1000


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    from_onnx(hostile.model())  # what is loaded once
    return {path.stem: path for path in hostile.make(tmp_path_factory.mktemp("hostile"))}


#: seeds of :mod:`tests.frontends.onnx.fuzz` that ended in another error than ImportModelError once: an attribute that
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


@pytest.mark.parametrize("seed", SEEDS)
def test_a_damaged_model_is_refused(seed):
    assert fuzz.check(seed) == "refused"


@pytest.mark.slow
def test_damaged_models():
    """In a process of its own, which a crash would end."""
    command = [sys.executable, "-m", "tests.frontends.onnx.fuzz", "0:2000"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
