"""A call of PyTorch's operators is bound once, whichever tensors of the caller a run reads and writes."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import fmtprop as fp
from fmtprop import dnnl
from fmtprop.ir.node import Choice, Node
from fmtprop.ir.types import TensorType
from fmtprop.layout import MemoryDesc
from fmtprop.ops import HostCall
from fmtprop.targets.bound import MovableMemory, OwnStream, Place
from fmtprop.targets.reference import ReferenceImplementation

WHOLE, PART = MemoryDesc((4, 6)), MemoryDesc((4, 3), strides=(6, 1), offset0=3)


def bound(target: str, operand: str, src: MemoryDesc, dst: MemoryDesc, memories: tuple[MovableMemory, MovableMemory]):
    call = HostCall(target, f'{{"self": {{"{operand}": "src_0"}}}}')
    choice = Choice("reference", "torch", {"src_0": src})
    node = Node("it", "aten", call, (TensorType(dst.dims),), descs=(dst,), choice=choice)
    places = {"src_0": Place(memories[0], src), "dst": Place(memories[1], dst)}
    return ReferenceImplementation("torch").build(1).bind(node, places, OwnStream())


@pytest.mark.parametrize("src", [WHOLE, PART], ids=["whole", "part"])
def test_a_call_follows_the_tensors_of_each_run(src: MemoryDesc) -> None:
    memories = MovableMemory(desc=WHOLE), MovableMemory(desc=MemoryDesc(src.dims))
    call = bound("aten.atan.default", "tensor", src, MemoryDesc(src.dims), memories)
    assert isinstance(call.pairs[0][1], partial)  # the operator itself: nothing is bound in a run
    for _ in range(2):
        x, y = torch.randn(5, 6)[1:], torch.empty(src.dims)
        memories[0].put(x)
        memories[1].put(y)
        call.run()
        assert torch.equal(y, x[:, -src.dims[1] :].atan())


def test_a_call_that_reads_a_view_is_bound_to_the_view_of_each_run() -> None:
    parts = MemoryDesc((4, 3, 2))
    memories = MovableMemory(desc=parts), MovableMemory(desc=MemoryDesc((4, 3)))
    call = bound("aten.abs.default", "parts", parts, MemoryDesc((4, 3)), memories)
    for _ in range(2):
        x, y = torch.randn(4, 3, 2), torch.empty(4, 3)
        memories[0].put(x)
        memories[1].put(y)
        call.run()
        assert torch.equal(y, torch.view_as_complex(x).abs())


def test_a_cleared_memory_keeps_no_tensor() -> None:
    memory = MovableMemory(desc=WHOLE)
    seen = memory.viewed_as(PART)
    assert seen is not None and memory.viewed_as(PART) is seen
    x = torch.randn(4, 6)
    memory.put(x)
    assert torch.equal(seen, x[:, 3:]) and seen.data_ptr() == x[:, 3:].data_ptr()
    memory.clear()
    assert seen.numel() == 0 and seen.data_ptr() == 0


def test_results_are_right_in_inference_mode_and_with_given_results() -> None:
    class Both(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.atan(), x.flip(0)

    net, out = fp.compile(Both(), torch.ones(3, 5)), (torch.empty(3, 5), torch.empty(3, 5))
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            x = torch.randn(3, 5)
            for got, wanted in zip(net(x), Both()(x), strict=True):
                torch.testing.assert_close(got, wanted)
            net(x, out=out)
            for got, wanted in zip(out, Both()(x), strict=True):
                torch.testing.assert_close(got, wanted)


def test_calls_share_the_object_of_a_memory_for_one_format() -> None:
    stream, md = OwnStream(), dnnl.NativeDesc.from_desc(WHOLE)
    x = torch.randn(4, 6)
    fixed, moving = MovableMemory(x), MovableMemory(desc=WHOLE)
    whole, behind, moved = stream.memory(fixed, md, 0), stream.memory(fixed, md, 64), stream.memory(moving, md, 0)
    assert stream.memory(fixed, md, 0) is whole and stream.memory(moving, md, 0) is moved is not whole
    moving.put(x)
    assert (whole.pointer, behind.pointer, moved.pointer) == (x.data_ptr(), x.data_ptr() + 64, x.data_ptr())
    stream.close()
    assert whole.closed and behind.closed and moved.closed
