"""The application on Ray Serve: the protocol over HTTP, full queues, late answers, and replicas that are killed."""

import json
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import fmtprop as fp
from fmtprop.errors import InputError
from fmtprop.serving import Engine, Spec

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'fmtprop[ray]'")
pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'fmtprop[ray]'")
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # Ray's own

PORT = 8231


def slow():
    """An engine that takes a second, and tells its threads."""

    def run(tensors):
        time.sleep(1)
        return [tensors[0] * 0 + torch.get_num_threads()]

    spec = Spec("x", torch.float32, (1, 1))
    return Engine((spec,), (spec,), run)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Two models: plans in a folder, on two replicas, and a slow one with a short queue."""
    from ray import serve

    from fmtprop.ray.serve import Settings, app, application

    folder = tmp_path_factory.mktemp("plans") / "small"
    folder.mkdir()
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 4))
    for rows in (1, 4):
        net = fp.compile(module, torch.ones(rows, 3, 8, 8), deterministic=True)
        net.save(folder / f"{rows}.fmtplan")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"port": PORT})
        serve.run(app({"model": str(folder), "replicas": "2"}), name="plans", route_prefix="/plans")
        settings = Settings(cpus=2, queue=2, timeout_ms=3000)
        serve.run(application({"slow": slow}, settings), name="slow", route_prefix="/slow")
        yield module
    finally:
        serve.shutdown()
        ray.shutdown()


def ask(path, data=None):
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def infer(model, x):
    row = {"name": x[0], "datatype": "FP32", "shape": list(x[1].shape), "data": x[1].flatten().tolist()}
    return ask(f"/{model}/infer", json.dumps({"inputs": [row]}).encode())


def test_the_protocol(served):
    assert ask("/plans/v2/health/live") == (200, {"live": True})
    assert ask("/plans/v2/health/ready") == (200, {"ready": True})
    assert ask("/plans/v2")[1]["extensions"] == ["binary_tensor_data"]
    assert ask("/plans/v2/models/small")[1]["inputs"][0]["shape"] == [-1, 3, 8, 8]
    assert ask("/plans/v2/models/other")[0] == 404
    assert ask("/plans/v2/models/small/infer")[0] == 405
    status, answer = ask("/plans/v2/models/small/infer", b"{}")
    assert status == 400 and answer["error"] == "inputs must be a list of objects, got None"


def test_a_killed_replica_loses_no_request(served):
    def one(seed):
        x = torch.randn(1 + seed % 5, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        name = ask("/plans/v2/models/small")[1]["inputs"][0]["name"]
        if seed == 60:
            actors = [one for one in ray.util.list_named_actors(all_namespaces=True) if "small" in one["name"]]
            ray.kill(ray.get_actor(actors[0]["name"], actors[0]["namespace"]))
        return x, infer("plans/v2/models/small", (name, x))

    with ThreadPoolExecutor(8) as pool:
        for x, (status, answer) in pool.map(one, range(240)):
            assert status == 200, answer
            expected = served(x).detach().numpy()
            got = np.reshape(answer["outputs"][0]["data"], answer["outputs"][0]["shape"])
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_full_queues_late_answers_and_threads(served):
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: infer("slow/v2/models/slow", ("x", torch.ones(1, 1))), range(12)))
    statuses = sorted(status for status, _ in answers)
    assert set(statuses) <= {200, 429, 504} and {200, 429} <= set(statuses), answers
    for status, answer in answers:
        if status == 200:
            assert answer["outputs"][0]["data"] == [2.0]  # the CPUs of a replica
        elif status == 429:
            assert answer["error"] == "2 requests wait for model slow already: try again later"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({}, "no model: serve run"),
        ({"model": "no/such.fmtplan"}, "there is no file no/such.fmtplan"),
        ({"model": {"a b": "x"}}, "a model cannot be called 'a b'"),
        ({"model": "a/x.fmtplan,b/x.fmtplan"}, "two models are called 'x'"),
        ({"model": __file__, "replicas": "0"}, "replicas must be a positive whole number, got 0"),
        ({"model": __file__, "cpus": "half"}, "cpus must be a positive whole number, got 'half'"),
        ({"model": __file__, "speed": "1"}, "there is no argument 'speed'; there are model, replicas, cpus"),
    ],
)
def test_wrong_arguments(arguments, why):
    from fmtprop.ray.serve import app

    with pytest.raises(InputError) as error:
        app(arguments)
    assert why in str(error.value)
