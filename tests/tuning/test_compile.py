"""A compilation is right whatever has become of the cache."""

from __future__ import annotations

import warnings

import pytest
import torch

from fmtprop.api import Options, compile_graph
from fmtprop.capture import GraphModule, load
from fmtprop.store import Store


@pytest.mark.parametrize("damage", ["none", "flipped", "truncated", "garbage", "directory"])
@pytest.mark.usefixtures("own_cache")
def test_the_next_compilation_is_right(damage: str) -> None:
    options = Options(policy="optimal", tune="measure", tune_budget=2.0)
    compile_graph(load("chain"), options)
    path = Store().path
    content = path.read_bytes()
    path.unlink()
    if damage == "flipped":
        path.write_bytes(content.replace(b"figure", b"figurf", 1))
    elif damage == "truncated":
        path.write_bytes(content[: len(content) // 2 + 1])
    elif damage == "garbage":
        path.write_bytes(b"\0\xff" * 500)
    elif damage == "directory":
        path.mkdir()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net = compile_graph(load("chain"), options)
    told = [warning for warning in caught if "the cache" in str(warning.message)]
    assert len(told) == (damage != "none")
    inputs = net.random_inputs()
    with torch.inference_mode():
        expected = GraphModule(load("chain"))(*inputs)
    assert torch.allclose(net.run_flat(inputs)[0], expected, rtol=1e-4, atol=1e-5)
