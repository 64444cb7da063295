"""The programs in examples/serving, each in a process of its own, as a user starts them."""

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

import fmtprop as fp

EXAMPLES = Path(__file__).parents[2] / "examples/serving"
ROWS = torch.arange(16.0).reshape(2, 8) / 16


@pytest.fixture(scope="module")
def module():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Softmax(-1))


@pytest.fixture(scope="module")
def plan(module, tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "model.fmtplan"
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        fp.compile(module, ROWS, deterministic=True).save(path)
    finally:
        torch.set_num_threads(before)
    return path


def needs(package):
    missing = importlib.util.find_spec(package) is None
    return [pytest.mark.peers, pytest.mark.skipif(missing, reason=f"{package} is not installed: make servers")]


@pytest.fixture
def start():
    """Start a server, wait until it is ready, and end it as an orchestrator does."""
    running = []

    def begin(command, ready, port, cwd=None):
        running.append(subprocess.Popen(command, cwd=cwd, start_new_session=True))
        end = time.monotonic() + 120
        while True:
            try:
                if ask(port, ready)[0] == 200:
                    return running[-1]
            except OSError:
                pass
            assert running[-1].poll() is None and time.monotonic() < end
            time.sleep(0.2)

    yield begin
    for process in running:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # LitServe leaves its workers
        process.wait()


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def ask(port, path, data=None, headers=None):
    body = None if data is None else json.dumps(data).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", body, {"Content-Type": "application/json", **(headers or {})}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            status, text = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read()
    return status, json.loads(text) if text[:1] in (b"{", b"[") else text


def infer(port, name, x, path="/v2/models/model/infer"):
    row = {"name": name, "datatype": "FP32", "shape": list(x.shape), "data": x.flatten().tolist()}
    return ask(port, path, {"inputs": [row]})


def check_protocol(port, module):
    name = ask(port, "/v2/models/model")[1]["inputs"][0]["name"]
    status, answer = infer(port, name, ROWS)
    assert status == 200, answer
    np.testing.assert_allclose(np.reshape(answer["outputs"][0]["data"], (2, 4)), module(ROWS).detach(), rtol=1e-5)
    status, answer = infer(port, name, torch.ones(2, 7))
    assert status == 400 and "it has plans for 8" in json.dumps(answer)
    assert infer(port, name, ROWS)[0] == 200
    assert infer(port, name, ROWS, "/v2/models/other/infer")[0] == 404


class TestServers:
    @pytest.mark.parametrize("package", [pytest.param("fastapi", marks=needs("fastapi"))])
    def test_fastapi(self, plan, module, start, package):
        port = free_port()
        command = [sys.executable, str(EXAMPLES / "fastapi_app.py"), str(plan), "--port", str(port)]
        server = start(command, "/v2/health/ready", port)
        check_protocol(port, module)
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) in (0, -signal.SIGTERM)

    @pytest.mark.parametrize("package", [pytest.param("litserve", marks=needs("litserve"))])
    def test_litserve(self, plan, module, start, package):
        port = free_port()
        start([sys.executable, str(EXAMPLES / "litserve_server.py"), str(plan), "--port", str(port)], "/health", port)
        (name,) = [name for name, *_ in fp.load_plan(plan).plan.inputs]
        status, answer = ask(port, "/predict", {name: ROWS[0].tolist()})
        assert status == 200, answer
        np.testing.assert_allclose(next(iter(answer.values())), module(ROWS[0]).detach(), rtol=1e-5)
        status, answer = ask(port, "/predict", {name: [1.0]})
        assert status == 400 and "it has plans for 8" in answer["detail"]
        status, answer = ask(port, "/predict", {})
        assert status == 400 and f"a request must have {name}" in answer["detail"]

    @pytest.mark.parametrize("package", [pytest.param("mlserver", marks=needs("mlserver"))])
    def test_mlserver(self, plan, module, start, package, tmp_path):
        port = free_port()
        settings = json.loads((EXAMPLES / "mlserver/model-settings.json").read_text())
        settings["parameters"]["uri"] = str(plan)
        (tmp_path / "model-settings.json").write_text(json.dumps(settings))
        ports = {"http_port": port, "grpc_port": free_port(), "metrics_port": free_port()}
        given = json.loads((EXAMPLES / "mlserver/settings.json").read_text())
        (tmp_path / "settings.json").write_text(json.dumps({**given, **ports}))
        (tmp_path / "runtime.py").write_text((EXAMPLES / "mlserver/runtime.py").read_text())
        start([str(Path(sys.executable).parent / "mlserver"), "start", "."], "/v2/models/model/ready", port, tmp_path)
        check_protocol(port, module)


def test_triton_s_files(plan, module, tmp_path, monkeypatch):
    """The backend's own module exists in Triton alone: a few lines stand for it."""
    backend = ModuleType("triton_python_backend_utils")
    backend.get_input_tensor_by_name = lambda request, name: request[name]
    backend.Tensor = lambda name, array: (name, array)
    backend.TritonError = str
    backend.InferenceResponse = lambda output_tensors, error=None: SimpleNamespace(results=output_tensors, error=error)
    monkeypatch.setitem(sys.modules, backend.__name__, backend)
    (tmp_path / "1").mkdir()
    (tmp_path / "1/model.fmtplan").write_bytes(plan.read_bytes())
    spec = importlib.util.spec_from_file_location("triton_model", EXAMPLES / "triton/model/1/model.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    model = made.TritonPythonModel()
    before = torch.get_num_threads()
    try:
        model.initialize({"model_config": "{}", "model_repository": str(tmp_path), "model_version": "1"})
    finally:
        torch.set_num_threads(before)
    (name,) = [one.name for one in model._rows.inputs]
    arrays = [ROWS.numpy(), np.ones((1, 7), np.float32), ROWS[:1].numpy()]
    good, bad, other = model.execute([{name: SimpleNamespace(as_numpy=lambda x=x: x)} for x in arrays])
    np.testing.assert_allclose(good.results[0][1], module(ROWS).detach(), rtol=1e-5)
    np.testing.assert_allclose(other.results[0][1], module(ROWS[:1]).detach(), rtol=1e-5)
    assert "it has plans for 8" in bad.error
