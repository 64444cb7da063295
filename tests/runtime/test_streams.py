"""Several single-thread runs at once: order, errors, backpressure, the end of a pool, and who is left undisturbed."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, wait

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop import dnnl
from fmtprop.runtime.agreement import relative_error
from fmtprop.runtime.streams import StreamPool
from tests.cli.command import listen_to_control_c
from tests.threads import torch_threads

SOON = 30.0  # seconds; what takes longer hangs


@pytest.fixture(scope="module", autouse=True)
def two_threads() -> Iterator[None]:
    with torch_threads(2):
        yield


@pytest.fixture(scope="module")
def model(two_threads: None) -> tuple[nn.Module, fp.CompiledModel]:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.LazyLinear(5)
    )
    module(torch.zeros(1, 3, 12, 12))
    module.eval()
    return module, fp.compile(module, torch.zeros(1, 3, 12, 12))


def images(count: int) -> list[torch.Tensor]:
    return list(torch.randn(count, 1, 3, 12, 12, generator=torch.Generator().manual_seed(1)))


def expected(module: nn.Module, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [module(x) for x in xs]


class Gate:
    """A function that stays inside until it is let go, and counts who is inside."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.entered = threading.Semaphore(0)
        self.started: list[object] = []

    def __call__(self, x: object = None) -> object:
        self.started.append(x)
        self.entered.release()
        assert self.opened.wait(SOON)
        return x


# ---------------------------------------------------------------- results


@pytest.mark.parametrize("streams", [1, 2, 3])
def test_results_come_in_order(model, streams):
    module, net = model
    xs = images(25)
    with net.throughput(streams) as pool:
        results = list(pool.map(xs))
    assert max(map(relative_error, results, expected(module, xs))) < 1e-5


def test_submit_gives_a_future(model):
    module, net = model
    xs = images(9)
    with net.throughput(streams=2) as pool:
        futures = [pool.submit(x) for x in xs]
        assert all(isinstance(future, Future) for future in futures)
        assert not wait(futures, SOON).not_done
    assert max(relative_error(f.result(), y) for f, y in zip(futures, expected(module, xs), strict=True)) < 1e-5


def test_a_model_takes_calls_without_a_pool(model):
    module, net = model
    xs = images(7)
    futures = [net.submit(x) for x in xs]
    assert max(relative_error(f.result(SOON), y) for f, y in zip(futures, expected(module, xs), strict=True)) < 1e-5
    with pytest.raises(fp.InputError, match=r"axis|shape|dims"):
        net.submit(torch.ones(3)).result(SOON)
    net.close()
    assert relative_error(net.submit(xs[0]).result(SOON), expected(module, xs)[0]) < 1e-5
    net.close()


def test_a_model_awaits_calls(model):
    module, net = model
    xs = images(3)

    async def serve() -> list[torch.Tensor]:
        return await asyncio.gather(*(asyncio.wrap_future(net.submit(x)) for x in xs))

    assert max(map(relative_error, asyncio.run(serve()), expected(module, xs))) < 1e-5
    net.close()


def test_many_threads_on_one_model_give_the_same_bits_as_one(model):
    _, net = model
    xs = images(8)
    one_by_one = [net(x) for x in xs]
    found: dict[int, list[torch.Tensor]] = {}
    threads = [threading.Thread(target=lambda i=i: found.update({i: [net(x) for x in xs]})) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert all(torch.equal(a, b) for ys in found.values() for a, b in zip(ys, one_by_one, strict=True))
    assert len(found) == 4


def test_one_stream_for_each_cpu_is_the_default(model):
    with model[1].throughput() as pool:
        assert pool.streams == len(os.sched_getaffinity(0))


def test_several_arguments_are_mapped_side_by_side():
    class Scaled(nn.Module):
        def forward(self, x, *, scale=2.0):
            return x * scale

    net = fp.compile(fp.from_torch(Scaled(), torch.ones(2)))
    with net.throughput(1) as pool:
        assert torch.equal(pool.submit(torch.ones(2), scale=2.0).result(SOON), torch.full((2,), 2.0))
    with StreamPool(lambda a, b: a - b, 2) as pool:
        assert list(pool.map([5, 6, 7], iter([1, 2]))) == [4, 4]


def test_items_are_taken_a_few_ahead_only():
    taken = []

    def items():
        for k in range(100):
            taken.append(k)
            yield k

    with StreamPool(lambda x: x, 2) as pool:
        results = pool.map(items())
        assert next(results) == 0
        assert len(taken) <= 2 * 2
        results.close()


def test_a_result_is_given_before_a_slow_next_item():
    second = threading.Event()

    def items():
        yield 1
        time.sleep(0.2)
        yield 2
        assert second.wait(SOON)
        yield 3

    with StreamPool(lambda x: x, 1) as pool:
        results = pool.map(items())
        assert next(results) == 1
        second.set()
        assert list(results) == [2, 3]


# ---------------------------------------------------------------- threads


def test_each_stream_has_one_thread_and_nobody_else_notices(model):
    net = model[1]
    seen = []

    def look(x):
        seen.append((torch.get_num_threads(), dnnl.lib().threads, threading.current_thread().name))
        return net(x)

    with StreamPool(look, 2, "net") as pool:
        list(pool.map(images(10)))
        assert torch.get_num_threads() == dnnl.lib().threads == 2
    assert {(a, b) for a, b, _ in seen} == {(1, 1)}
    assert all(name.startswith("fmtprop-net") for _, _, name in seen)
    assert torch.get_num_threads() == 2


def test_the_model_runs_on_all_threads_beside_its_pool(model):
    module, net = model
    xs = images(20)
    want = expected(module, xs)
    with net.throughput(2) as pool:
        beside = pool.map(xs)
        for y in want:
            assert relative_error(net(xs[0]), want[0]) < 1e-5
            assert relative_error(next(beside), y) < 1e-5
    assert net.prepare(1).threads == 1
    assert net.prepare(2) is net.plan


def test_streams_are_single_even_where_torch_has_another_openmp(model, monkeypatch):
    from fmtprop.runtime import threads

    monkeypatch.setattr(threads, "torch_governs", lambda: False)
    module, net = model
    xs = images(4)
    with net.throughput(2) as pool:
        assert max(map(relative_error, pool.map(xs), expected(module, xs))) < 1e-5


# ---------------------------------------------------------------- errors


def test_an_error_comes_through_the_future_and_the_stream_goes_on(model):
    module, net = model
    xs = images(1)
    with net.throughput(1) as pool:
        wrong = pool.submit(torch.ones(1, 3, 5, 5))
        with pytest.raises(fp.InputError, match=r"has shape \(1, 3, 5, 5\), but the model was compiled for"):
            wrong.result(SOON)
        assert relative_error(pool.submit(xs[0]).result(SOON), expected(module, xs)[0]) < 1e-5


def test_an_error_ends_a_map_in_its_turn():
    def picky(x: int) -> int:
        if x == 3:
            raise ValueError("three")
        return x

    got = []
    with StreamPool(picky, 2) as pool:
        with pytest.raises(ValueError, match="three"):
            for y in pool.map(range(100)):
                got.append(y)
        assert pool.submit(7).result(SOON) == 7
    assert got == [0, 1, 2]


@pytest.mark.parametrize("streams", [0, -1, 1.5, True, "2", 10**9])
def test_a_wrong_number_of_streams(model, streams):
    with pytest.raises(fp.InputError, match=r"streams must be a positive number of threads or None, got "):
        model[1].throughput(streams)


def test_a_closed_pool_refuses_and_says_so():
    pool = StreamPool(lambda x: x, 1, "net")
    pool.close()
    pool.close()
    for call in (lambda: pool.submit(1), lambda: pool.map([1])):
        with pytest.raises(fp.PlanError, match=r"model net: this pool of streams is closed; call throughput\(\) for a"):
            call()


def _in_child(pool: StreamPool, queue) -> None:
    try:
        pool.submit(1)
    except fp.PlanError as error:
        pool.close()  # waits for nobody
        queue.put(str(error))


def test_a_forked_child_is_told_that_the_pool_is_not_its_own():
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    with StreamPool(lambda x: x, 1) as pool:
        assert pool.submit(1).result(SOON) == 1
        child = context.Process(target=_in_child, args=(pool, queue))
        child.start()
        try:
            message = queue.get(timeout=SOON)
        finally:
            child.kill()
            child.join()
    assert f"belongs to process {os.getpid()}" in message
    assert "call throughput() in this process" in message


def _submit_in_child(net: fp.CompiledModel, x: torch.Tensor, queue) -> None:
    queue.put([net.submit(x).result(SOON).tolist()] * 2)


def _pool_in_child(net: fp.CompiledModel, x: torch.Tensor, queue) -> None:
    with net.throughput(2) as pool:
        queue.put([y.tolist() for y in pool.map([x, x])])


@pytest.mark.parametrize("work", [_pool_in_child, _submit_in_child])
def test_a_forked_child_can_have_a_pool_of_its_own(model, work):
    module, x = model[0], images(1)[0]
    fresh = fp.compile(module, x)  # no plan for one thread exists before the fork
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=work, args=(fresh, x, queue))
    child.start()
    try:
        got = queue.get(timeout=SOON)
    finally:
        child.kill()
        child.join()
    assert relative_error(torch.tensor(got[1]), expected(module, [x])[0]) < 1e-5


# ---------------------------------------------------------------- backpressure and the end


def test_submit_waits_when_every_stream_has_enough():
    gate = Gate()
    with StreamPool(gate, 1) as pool:
        running, waiting = pool.submit(1), pool.submit(2)
        third: list[Future] = []
        thread = threading.Thread(target=lambda: third.append(pool.submit(3)))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        gate.opened.set()
        thread.join(SOON)
        assert [running.result(SOON), waiting.result(SOON), third[0].result(SOON)] == [1, 2, 3]


def test_a_callback_may_submit():
    done: Future[int] = Future()
    with StreamPool(lambda x: x, 1) as pool:

        def again(future: Future[int]) -> None:
            if future.result() == 10:
                done.set_result(10)
            else:
                pool.submit(future.result() + 1).add_done_callback(again)
                pool.submit(-1)
                pool.submit(-1)

        pool.submit(0).add_done_callback(again)
        assert done.result(SOON) == 10


def test_a_callback_may_close():
    closed = threading.Event()
    pool = StreamPool(lambda x: x, 1)
    pool.submit(1).add_done_callback(lambda _: (pool.close(), closed.set()))
    assert closed.wait(SOON)


def test_leaving_the_block_waits_for_all_calls():
    finished = []

    def slowly(x: int) -> None:
        time.sleep(0.05)
        finished.append(x)

    with StreamPool(slowly, 2) as pool:
        for k in range(4):
            pool.submit(k)
    assert sorted(finished) == [0, 1, 2, 3]


def test_an_exception_cancels_what_has_not_started():
    gate = Gate()
    with pytest.raises(KeyboardInterrupt), StreamPool(gate, 1) as pool:
        first, second = pool.submit(1), pool.submit(2)
        assert gate.entered.acquire(timeout=SOON)
        threading.Timer(0.1, gate.opened.set).start()
        raise KeyboardInterrupt
    assert first.result(SOON) == 1
    assert second.cancelled()
    assert gate.started == [1]


def test_closing_frees_those_who_wait_to_submit():
    gate = Gate()
    pool = StreamPool(gate, 1)
    pool.submit(1)
    assert gate.entered.acquire(timeout=SOON)
    second = pool.submit(2)
    refused: list[BaseException] = []

    def late() -> None:
        try:
            pool.submit(3)
        except fp.PlanError as error:
            refused.append(error)

    thread = threading.Thread(target=late)
    thread.start()
    time.sleep(0.1)
    closer = threading.Thread(target=lambda: pool.close(cancel=True))
    closer.start()
    gate.opened.set()
    closer.join(SOON)
    thread.join(SOON)
    assert not thread.is_alive()
    assert len(refused) == 1
    with pytest.raises(CancelledError):
        second.result(SOON)


def test_an_abandoned_map_cancels_its_calls_and_frees_their_room():
    gate = Gate()
    with StreamPool(gate, 1) as pool:
        results = pool.map(iter([1, 2, 3]))
        thread = threading.Thread(target=lambda: next(results))
        thread.start()
        assert gate.entered.acquire(timeout=SOON)
        gate.opened.set()
        thread.join(SOON)
        results.close()
        assert [pool.submit(k).result(SOON) for k in (7, 8, 9)] == [7, 8, 9]


INTERRUPTED = """
import itertools, sys, torch, fmtprop as fp
net = fp.compile(torch.nn.Conv2d(8, 8, 3), torch.ones(1, 8, 64, 64))
try:
    with net.throughput(2) as pool:
        for k, y in enumerate(pool.map(itertools.repeat(torch.ones(1, 8, 64, 64)))):
            if k == 20:
                print("running", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_control_c_ends_a_program():
    command = [sys.executable, "-c", INTERRUPTED]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=listen_to_control_c)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "running\n"
        child.send_signal(signal.SIGINT)
        out, _ = child.communicate(timeout=SOON)
    finally:
        child.kill()
        child.wait()
    assert out == "interrupted\n"
    assert child.returncode == 0
