from __future__ import annotations

import copy
import gc
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from ctypes import CDLL, c_void_p

import pytest

from fmtprop import dnnl
from fmtprop.dnnl.handle import Handle
from fmtprop.errors import DnnlError, HandleError
from tests.dnnl.support import SAME, any_of, plain


def convolution(prop: str = "forward_inference") -> dnnl.PrimitiveDesc:
    src, weights, dst = any_of((1, 8, 6, 6)), any_of((8, 8, 3, 3)), any_of((1, 8, 6, 6))
    return dnnl.create(dnnl.Convolution(prop=prop, src=src, weights=weights, dst=dst, **SAME))


def test_close_is_idempotent_and_use_afterwards_is_an_error() -> None:
    stream = dnnl.Stream()
    alive = dnnl.live_handles()["stream"]
    stream.close()
    stream.close()
    assert stream.closed
    assert dnnl.live_handles().get("stream", 0) == alive - 1
    with pytest.raises(HandleError, match=r"stream handle used after close\(\): create a new Stream"):
        stream.wait()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_handle_has_one_owner(duplicate: Callable[[object], object]) -> None:
    with dnnl.Stream() as stream:
        with pytest.raises(HandleError, match="a stream handle belongs to one owner in one process and can be neither"):
            duplicate(stream)
        assert not stream.closed


def test_with_and_garbage_collection_destroy() -> None:
    before = dnnl.live_handles().get("post_ops", 0)
    with dnnl.PostOps() as post_ops:
        assert dnnl.live_handles()["post_ops"] == before + 1
    assert post_ops.closed
    post_ops = dnnl.PostOps()
    del post_ops
    gc.collect()
    assert dnnl.live_handles().get("post_ops", 0) == before


@pytest.mark.parametrize("primitive_first", [True, False])
def test_owners_may_close_in_any_order(primitive_first: bool) -> None:
    pd = convolution()
    primitive = dnnl.Primitive(pd)
    for handle in (primitive, pd) if primitive_first else (pd, primitive):
        handle.close()
    assert repr(pd) == "PrimitiveDesc(closed)"


def test_no_reference_cycles_keep_handles_alive() -> None:
    gc.collect()
    gc.disable()
    try:
        before = dnnl.live_handles().get("primitive_desc", 0)
        pd = convolution()
        assert len(list(pd.implementations())) > 1
        del pd
        assert dnnl.live_handles().get("primitive_desc", 0) == before
    finally:
        gc.enable()


def test_sketches_of_a_walk_are_what_implementations_are() -> None:
    every = [(pd.impl, pd.query_md("weights"), pd.scratchpad_nbytes) for pd in convolution().implementations()]
    before = dnnl.live_handles().get("primitive_desc", 0)
    walker = convolution()
    told, sketches = [], []
    for pd in walker.walk():
        assert pd is walker
        told.append((pd.impl, pd.query_md("weights"), pd.scratchpad_nbytes))
        sketches.append(pd.sketch())
        assert dnnl.live_handles()["primitive_desc"] == before + 1, "a sketch takes no native object"
    assert told == every and len(every) > 1
    walker.close()
    # in another order, and with some of them in oneDNN's primitive cache
    for pd, known in reversed(list(zip(sketches, every, strict=True))):
        assert not pd.closed
        dnnl.Primitive(pd).close()
        with pd.clone() as fresh:
            assert (fresh.impl, fresh.query_md("weights"), fresh.scratchpad_nbytes) == known
    for pd in sketches:
        pd.close()
        assert pd.closed
    assert dnnl.live_handles().get("primitive_desc", 0) == before


def test_many_threads_make_a_sketch_s_object_once() -> None:
    whole = convolution()
    for _ in range(20):
        pd = whole.sketch()
        before = dnnl.live_handles().get("primitive_desc", 0)
        threads = [threading.Thread(target=lambda pd=pd: pd.handle) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert dnnl.live_handles()["primitive_desc"] == before + 1


def test_a_sketch_can_be_closed() -> None:
    pd = convolution().sketch()
    pd.close()
    assert pd.closed
    with pytest.raises(HandleError, match=r"primitive_desc handle used after close"):
        pd.clone()


def test_a_hint_may_be_a_sketch_too() -> None:
    hint = convolution("forward_training").sketch()
    image, weights = any_of((1, 8, 6, 6)), any_of((8, 8, 3, 3))
    problem = dnnl.Convolution(prop="backward_data", diff_src=image, weights=weights, diff_dst=image, **SAME)
    backward = dnnl.create(problem, hint=hint)
    assert backward.sketch().clone().impl == backward.impl


def test_an_implementation_that_is_not_offered_any_more_is_named() -> None:
    pd = convolution().sketch()
    pd._impl = "jit:of_yesterday"
    with pytest.raises(DnnlError, match=r"jit:of_yesterday is not offered any more; was the number of threads changed"):
        dnnl.Primitive(pd)


def test_one_of_many_threads_destroys() -> None:
    """Destroying twice aborts the process: this test passes by surviving."""
    for _ in range(50):
        handle = dnnl.PostOps()
        barrier = threading.Barrier(4)

        def close(handle: dnnl.PostOps = handle, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            handle.close()

        threads = [threading.Thread(target=close) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert handle.closed


def test_control_c_while_a_handle_is_collected_is_not_lost() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    handle = Handle(c_void_p(signal.SIGINT), CDLL(None)["raise"])  # destroying it sends the signal
    try:
        with pytest.raises(KeyboardInterrupt):
            del handle
            time.sleep(1.0)  # where Python handles the signal
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handle_that_was_finalized_is_closed() -> None:
    """In a cycle, another finalizer may come later, such as that of a generator that stands in `with`."""
    destroyed: list[object] = []
    handle: Handle[c_void_p] = Handle(c_void_p(1), destroyed.append)  # type: ignore[arg-type,func-returns-value]
    handle.__del__()
    assert handle.closed
    handle.close()
    assert len(destroyed) == 1


def test_a_failed_constructor_leaves_nothing() -> None:
    before = dnnl.live_handles().get("memory", 0)
    with pytest.raises(DnnlError, match=r"needs a concrete format, not `any`"):
        dnnl.Memory(dnnl.Engine.cpu(), any_of((2, 2)), None)
    gc.collect()
    assert dnnl.live_handles().get("memory", 0) == before


def test_a_closed_cached_desc_is_made_again() -> None:
    desc = plain((3, 5, 7))
    desc.close()
    again = plain((3, 5, 7))
    assert not again.closed and again.dims == (3, 5, 7)
    assert repr(desc) == "NativeDesc(closed)"


def test_interpreter_shutdown_with_live_handles_is_quiet() -> None:
    code = (
        "from fmtprop import dnnl; from fmtprop.layout import MemoryDesc as M\n"
        "d = dnnl.NativeDesc.from_desc(M((2, 3), 'f32'))\n"
        "s = dnnl.Stream(); m = dnnl.Memory(dnnl.Engine.cpu(), d, None); cycle = [s, m]; cycle.append(cycle)\n"
    )
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_thousand_rounds_leak_nothing() -> None:
    def round_trip() -> None:
        with convolution() as pd, dnnl.Primitive(pd), dnnl.Stream():
            pd.query_md("dst")

    round_trip()
    gc.collect()
    before = dnnl.live_handles()
    for _ in range(1000):
        round_trip()
    gc.collect()
    assert dnnl.live_handles() == before
