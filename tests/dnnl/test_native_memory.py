from __future__ import annotations

import sys
import threading
from ctypes import c_int

import numpy as np
import pytest

from fmtprop import dnnl
from fmtprop.dnnl import Arg
from fmtprop.errors import DnnlError, InputError, UnsupportedOpError
from tests.dnnl.support import SAME, any_of, over, plain, tagged

torch = pytest.importorskip("torch")


def relu(desc: dnnl.NativeDesc) -> dnnl.Primitive:
    return dnnl.Primitive(dnnl.create(dnnl.Eltwise(src=desc, dst=desc, alg="eltwise_relu")))


def test_tensor_without_a_copy() -> None:
    x, y = torch.randn(2, 16, 4, 4), torch.zeros(2, 16, 4, 4)
    desc = plain((2, 16, 4, 4))
    src, dst = dnnl.memory_of(x, desc), dnnl.memory_of(y, desc)
    assert src.pointer == x.data_ptr()
    with dnnl.Stream() as stream:
        relu(desc).execute(stream, {Arg.SRC: src, Arg.DST: dst})
    assert torch.equal(y, x.relu())


def test_memory_keeps_the_tensor_alive() -> None:
    x = torch.ones(4)
    references = sys.getrefcount(x)
    memory = dnnl.memory_of(x, plain((4,)))
    assert sys.getrefcount(x) == references + 1
    assert memory.owner is x


def test_tensor_too_small() -> None:
    base = torch.zeros(100)
    dnnl.memory_of(base[50:], plain((50,)))
    with pytest.raises(InputError, match=r"tensor has 196 bytes .* needs 200; allocate as many bytes"):
        dnnl.memory_of(base[51:], plain((50,)))


def test_blocked_needs_its_padding() -> None:
    desc = tagged((1, 17, 2, 2), "aBcd16b")
    with pytest.raises(InputError, match=r"needs 512"):
        dnnl.memory_of(torch.zeros(1, 17, 2, 2), desc)


def test_set_data_handle() -> None:
    desc = plain((4,))
    first, second = np.zeros(4, np.float32), np.ones(4, np.float32)
    memory = over(first, desc)
    memory.set_data_handle(second.ctypes.data)
    assert memory.pointer == second.ctypes.data
    memory.set_data_handle(None)
    assert memory.pointer is None


def test_execute_checks_every_argument() -> None:
    desc, other = plain((2, 3)), plain((3, 2))
    x = np.zeros((2, 3), np.float32)
    good = over(x, desc)
    primitive = relu(desc)
    stream = dnnl.Stream()
    with pytest.raises(InputError, match=r"argument SRC: memory is f32 3x2 ab but must be f32 2x3 ab; reorder it"):
        primitive.execute(stream, {Arg.SRC: over(x, other), Arg.DST: good})
    with pytest.raises(InputError, match=r"argument DST: the memory has no buffer; call set_data_handle first"):
        primitive.execute(stream, {Arg.SRC: good, Arg.DST: dnnl.Memory(dnnl.Engine.cpu(), desc, None)})
    with pytest.raises(InputError, match=r"takes no argument WEIGHTS"):
        primitive.execute(stream, {Arg.SRC: good, Arg.DST: good, Arg.WEIGHTS: good})
    with pytest.raises(DnnlError, match=r"_execute answered invalid_arguments: .* SRC: f32 2x3 ab; not given: DST"):
        primitive.execute(stream, {Arg.SRC: good})


def test_missing_scratchpad_is_named() -> None:
    src, weights, dst = any_of((1, 16, 8, 8)), any_of((16, 16, 3, 3)), any_of((1, 16, 8, 8))
    first = dnnl.create(dnnl.Convolution(src=src, weights=weights, dst=dst, **SAME))
    pd = next((p for p in first.implementations() if p.scratchpad_nbytes), None)
    if pd is None:
        pytest.skip(f"no implementation with a scratchpad on {dnnl.lib().isa}")
    descs = {Arg.SRC: pd.query_md("src"), Arg.WEIGHTS: pd.query_md("weights"), Arg.DST: pd.query_md("dst")}
    memories: dict[int | Arg, dnnl.Memory] = {}
    for arg, desc in descs.items():
        assert desc is not None
        memories[arg] = over(np.zeros(desc.nbytes, np.uint8), desc)
    with pytest.raises(InputError, match=rf"no SCRATCHPAD given; it needs {pd.scratchpad_nbytes} bytes"):
        dnnl.Primitive(pd).execute(dnnl.Stream(), memories)


def test_post_op_arguments_are_named() -> None:
    desc = plain((2, 3))
    attr = dnnl.PrimitiveAttr(dnnl.PostOps().append_binary("binary_add", desc))
    primitive = dnnl.Primitive(dnnl.create(dnnl.Eltwise(src=desc, dst=desc, alg="eltwise_relu"), attr))
    good, wrong = over(np.zeros(6, np.float32), desc), over(np.zeros(6, np.float32), plain((3, 2)))
    with pytest.raises(InputError, match=r"ATTR_MULTIPLE_POST_OP\(0\)\|SRC_1"):
        primitive.execute(
            dnnl.Stream(), {Arg.SRC: good, Arg.DST: good, Arg.ATTR_MULTIPLE_POST_OP(0) | Arg.SRC_1: wrong}
        )


def test_hot_path() -> None:
    desc = plain((1, 8))
    x, y = np.array([[-1, 2] * 4], np.float32), np.zeros((1, 8), np.float32)
    primitive, stream = relu(desc), dnnl.Stream()
    args = dnnl.ExecArgs([(Arg.SRC, over(x, desc)), (Arg.DST, over(y, desc))])
    assert isinstance(args.count, c_int) and args.count.value == 2
    execute, handle, on = dnnl.hot_execute, primitive.handle, stream.handle
    assert execute(handle, on, args.count, args.array) == 0
    np.testing.assert_array_equal(y, [[0, 2] * 4])
    # A failing call answers a status; it does not raise.
    assert execute(handle, on, c_int(1), args.array) != 0
    # Converting arguments through argtypes would cost more than the call.
    assert execute.argtypes is None and execute.restype is c_int


def test_two_threads_at_once() -> None:
    desc = plain((64, 64))
    primitive = relu(desc)
    failures: list[str] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        x, y = rng.standard_normal((64, 64), np.float32), np.zeros((64, 64), np.float32)
        with dnnl.Stream() as stream:
            args: dict[int | Arg, dnnl.Memory] = {Arg.SRC: over(x, desc), Arg.DST: over(y, desc)}
            for _ in range(100):
                y[:] = -1
                primitive.execute(stream, args)
                if not np.array_equal(y, np.maximum(x, 0)):
                    failures.append(f"thread {seed}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_attr_errors() -> None:
    with pytest.raises(UnsupportedOpError, match=r"no algorithm 'relu'; known: .*eltwise_relu"):
        dnnl.PostOps().append_eltwise("relu")
    with pytest.raises(DnnlError, match=r"dnnl_post_ops_append_eltwise answered invalid_arguments"):
        dnnl.PostOps().append_eltwise("binary_add")


def test_unknown_operand_name() -> None:
    pd = relu(plain((2, 3))).desc
    with pytest.raises(UnsupportedOpError, match=r"eltwise: unknown operand 'output'; use one of src"):
        pd.query_md("output")
    assert pd.query_md("weights") is None and pd.arg_md(Arg.BIAS) is None
