"""A compiled model in other processes: many at once, workers of each kind, copies; weights are in memory once."""

import copy
import hashlib
import io
import multiprocessing
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import fmtprop as fp

#: bytes of the model's weights: large beside what a process has of its own
_WEIGHTS_NBYTES = 4 * 3 * 2048 * 2048


def wide():
    """Layers with 48 MB of weights."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(2048, 2048, bias=False) for _ in range(3)]
    return torch.nn.Sequential(*layers).eval(), torch.randn(4, 2048)


def small():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).eval(), torch.randn(
        2, 8
    )


@pytest.fixture(scope="module")
def compiled():
    module, x = small()
    net = fp.compile(module, x, deterministic=True)
    return net, x, net(x)


WORKER = """
import hashlib, re, sys, torch, fmtprop as fp
torch.set_num_threads(int(sys.argv[2]))
net = fp.load_plan(sys.argv[1], on_mismatch="error")
torch.manual_seed(1)
result = net(torch.randn(4, 2048))
print(hashlib.sha256(result.numpy().tobytes()).hexdigest(), flush=True)
sys.stdin.readline()
mine = [part for part in open("/proc/self/smaps").read().split("VmFlags") if sys.argv[1] in part]
for key in ("Rss", "Pss"):
    print(sum(int(re.search(rf"^{key}: +([0-9]+) kB", part, re.M)[1]) for part in mine), end=" ")
print(flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's account of memory")
def test_processes_at_once_give_equal_bits_and_share_the_weights(tmp_path):
    """Each maps the whole file, and has its share of it."""
    module, x = wide()
    net = fp.compile(module, x, deterministic=True)
    path = tmp_path / "net.fmtplan"
    net.save(path)
    torch.manual_seed(1)
    expected = net(torch.randn(4, 2048))
    command = [sys.executable, "-c", WORKER, str(path), str(torch.get_num_threads())]
    workers = [subprocess.Popen(command, stdin=-1, stdout=-1, text=True) for _ in range(4)]
    try:
        digests = {worker.stdout.readline() for worker in workers}
        figures = []
        for worker in workers:
            worker.stdin.write("\n")
            worker.stdin.flush()
            figures.append([1024 * int(word) for word in worker.stdout.readline().split()])
        assert len(digests) == 1
        for rss, pss in figures:
            assert rss > 0.9 * _WEIGHTS_NBYTES
            assert pss < 0.4 * _WEIGHTS_NBYTES
    finally:
        for worker in workers:
            worker.communicate("\n\n")
    assert digests == {hashlib.sha256(expected.numpy().tobytes()).hexdigest() + "\n"}


def answer(net, x, queue):
    queue.put(net(x).tolist())  # a tensor would be shared with a process that ends


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_multiprocessing(compiled, method):
    """An argument of a process, whichever way that starts."""
    net, x, expected = compiled
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=answer, args=(net, x, queue))
    process.start()
    assert queue.get(timeout=120) == expected.tolist()
    process.join()
    assert process.exitcode == 0


class Scored(Dataset):
    """Rows with the scores of a compiled model."""

    def __init__(self, net, rows):
        self.net, self.rows = net, rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, place):
        return self.net(self.rows[place].expand(2, -1).contiguous())[0]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_of_a_data_loader(compiled, method):
    net, *_ = compiled
    rows = torch.randn(6, 8)
    expected = torch.stack([Scored(net, rows)[place] for place in range(6)])
    loader = DataLoader(Scored(net, rows), batch_size=3, num_workers=1, multiprocessing_context=method)
    torch.testing.assert_close(torch.cat(list(loader)), expected)


def test_copies(compiled):
    """Pickle, torch.save and copies; a model inside another object."""
    net, x, expected = compiled
    file = io.BytesIO()
    torch.save({"net": net, "also": net}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded["net"] is loaded["also"]
    for again in (loaded["net"], pickle.loads(pickle.dumps(net)), copy.copy(net), copy.deepcopy({"net": net})["net"]):
        assert torch.equal(again(x), expected)


def test_cloudpickle(compiled):
    """As Ray and Spark send functions: with what they close over."""
    cloudpickle = pytest.importorskip("cloudpickle")
    net, x, expected = compiled
    assert torch.equal(pickle.loads(cloudpickle.dumps(lambda: net(x)))(), expected)


@pytest.mark.parametrize("protocol", [4, 5])
def test_pickled_bytes_have_the_weights_once(protocol):
    module, x = wide()
    data = pickle.dumps(fp.compile(module, x, deterministic=True), protocol)
    assert _WEIGHTS_NBYTES < len(data) < 1.05 * _WEIGHTS_NBYTES


def test_a_model_for_training_is_refused():
    """With one error that names the remedy."""
    module, x = small()
    step = fp.compile(module, x, training=True)
    with pytest.raises(fp.FmtpropError, match=r"for training cannot be pickled: .*Save its state_dict"):
        pickle.dumps(step)
    with pytest.raises(fp.FmtpropError, match=r"for training cannot be saved as a plan: .*Save its state_dict"):
        step.save(os.devnull)
