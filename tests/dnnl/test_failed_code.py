"""Code that oneDNN cannot generate: the error says that the process is spoilt."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fmtprop import dnnl

PROGRAM = """
from fmtprop import dnnl
from fmtprop.errors import DnnlError
from tests.dnnl.support import any_of

ones = dict(strides=(1, 1), dilates=(0, 0), pad_l=(0, 0), pad_r=(0, 0))
dims = 2, 17, 5, 7

def convolution(attr):
    weights = any_of((17, 1, 1, 1, 1))
    return dnnl.create(dnnl.Convolution(src=any_of(dims), weights=weights, dst=any_of(dims), **ones), attr)

for alg in ("binary_add", "binary_eq", "binary_mul"):
    attr = dnnl.PrimitiveAttr(dnnl.PostOps().append_binary(alg, any_of(dims)))
    try:
        dnnl.Primitive(convolution(attr)).close()
        print(alg, "made")
    except DnnlError as error:
        print(alg, str(error).splitlines()[0])
"""


@pytest.mark.skipif(dnnl.lib().lanes < 16 or dnnl.lib().version != (3, 2, 0), reason="oneDNN 3.2.0 on AVX-512 fails")
def test_after_code_that_cannot_be_generated_the_message_asks_for_another_process() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    first, failed, after = done.stdout.splitlines()
    assert first == "binary_add made"
    for line in (failed, after):
        assert "runtime_error" in line and line.endswith("generated in this process: start another"), line
