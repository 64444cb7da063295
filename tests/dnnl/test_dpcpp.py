"""The DPC++ wheel of oneDNN works beside the OpenMP one, with nothing set by the user."""

from __future__ import annotations

import os
import subprocess
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import os
import numpy as np
from fmtprop import dnnl
from fmtprop.dnnl import Arg, NativeDesc, doctor
from fmtprop.layout import MemoryDesc

library = dnnl.load()
assert library.runtime == "SYCL", library
assert os.environ["OCL_ICD_FILENAMES"].endswith("libintelocl.so")
engine, stream = dnnl.Engine.cpu(), dnnl.Stream()

def over(array, desc):
    return dnnl.Memory(engine, desc, array.ctypes.data, array)

x = np.random.default_rng(0).standard_normal((2, 17, 9, 8)).astype(np.float32)
plain = NativeDesc.from_desc(MemoryDesc(x.shape, "f32"))
blocked = NativeDesc.from_desc(MemoryDesc(x.shape, "f32", tag="aBcd16b"))
middle, back = np.zeros(blocked.nbytes // 4, np.float32), np.zeros_like(x)
for src, dst, a, b in ((plain, blocked, x, middle), (blocked, plain, middle, back)):
    pd = dnnl.create(dnnl.Reorder(src=src, dst=dst))
    args = {Arg.SRC: over(a, src), Arg.DST: over(b, dst)}
    scratchpad = pd.query_md("scratchpad")
    if scratchpad is not None:
        args[Arg.SCRATCHPAD] = over(np.zeros(scratchpad.nbytes, np.uint8), scratchpad)
    dnnl.Primitive(pd).execute(stream, args)
np.testing.assert_array_equal(back, x)

pd = dnnl.create(dnnl.GroupNormalization(src=plain, dst=plain, groups=17, epsilon=1e-5))
args = {Arg.SRC: over(x, plain), Arg.DST: over(back, plain)}
scratchpad = pd.query_md("scratchpad")
if scratchpad is not None:
    args[Arg.SCRATCHPAD] = over(np.zeros(scratchpad.nbytes, np.uint8), scratchpad)
dnnl.Primitive(pd).execute(stream, args)
mean, variance = x.mean((2, 3), keepdims=True), x.var((2, 3), keepdims=True)
np.testing.assert_allclose(back, (x - mean) / np.sqrt(variance + 1e-5), rtol=1e-4, atol=1e-4)
text = doctor.diagnose().to_text()
assert "(SYCL)" in text and "submits through SYCL" in text
print("version", *library.version)
"""


@pytest.mark.slow
def test_dpcpp_wheel(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python = str(tmp_path / "env" / "bin" / "python")
    install = [python, "-m", "pip", "install", "-q", "onednn", "numpy"]
    done = subprocess.run(install, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        pytest.skip(f"the package index does not offer the onednn wheel here: {done.stderr[-300:]}")
    environment = {name: value for name, value in os.environ.items() if name not in ("OCL_ICD_FILENAMES", "DNNLROOT")}
    environment |= {"PYTHONPATH": str(ROOT), "FMTPROP_DNNL_LIBRARY": ""}
    command = [python, "-W", "error", "-c", PROGRAM]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("version 3"), result.stdout
