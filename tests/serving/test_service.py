"""The Open Inference Protocol v2 without a server: good requests, bad ones, and what waits."""

import asyncio
import json
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fmtprop as fp
from fmtprop.serving import Engine, Service, Spec

LENGTH = "inference-header-content-length"


class Two(torch.nn.Module):
    """Two inputs, two results."""

    def forward(self, image, token):
        return image.flatten(1).sum(1, keepdim=True), token * 2


@pytest.fixture(scope="module")
def net():
    return fp.compile(Two(), (torch.ones(4, 3, 2), torch.ones(4, 5, dtype=torch.int64)), deterministic=True)


def ask(service, method, path, body=b"", headers=None):
    """Ask once; return the status, and the JSON or the parts of the answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = asyncio.run(service.handle(method, path, headers or {}, data))
    length = int(answer.headers.get("Inference-Header-Content-Length", len(answer.body)))
    assert answer.headers["Content-Type"] == (
        "application/json" if length == len(answer.body) else "application/octet-stream"
    )
    return answer.status, json.loads(answer.body[:length]), answer.body[length:]


def body(rows=2, **more):
    image = {"name": "image", "datatype": "FP32", "shape": [rows, 3, 2], "data": [0.5] * rows * 6}
    token = {"name": "token", "datatype": "INT64", "shape": [rows, 5], "data": [[1, 2, 3, 4, 5]] * rows}
    return {"inputs": [image, token], **more}


def test_health_and_metadata(net):
    service = Service({"two": net})
    assert ask(service, "GET", "/v2/health/live")[:2] == (200, {"live": True})
    assert ask(service, "GET", "/v2/health/ready")[:2] == (200, {"ready": True})
    assert ask(service, "GET", "/v2/models/two/ready")[:2] == (200, {"name": "two", "ready": True})
    server = ask(service, "GET", "/v2")[1]
    assert server == {"name": "fmtprop", "version": fp.__version__, "extensions": ["binary_tensor_data"]}
    model = ask(service, "GET", "/v2/models/two/versions/1")[1]
    assert model["name"] == "two" and model["versions"] == ["1"]
    assert model["inputs"][0] == {"name": "image", "datatype": "FP32", "shape": [-1, 3, 2]}
    assert [one["datatype"] for one in model["outputs"]] == ["FP32", "INT64"]


@pytest.mark.parametrize("rows", [0, 1, 4, 11])
def test_json(net, rows):
    status, answer, _ = ask(Service({"two": net}), "POST", "/v2/models/two/infer", body(rows, id="a"))
    assert status == 200 and answer["id"] == "a" and answer["model_name"] == "two" and answer["model_version"] == "1"
    total, double = answer["outputs"]
    assert total["shape"] == [rows, 1] and total["data"] == [3.0] * rows
    assert double["shape"] == [rows, 5] and double["data"] == [2, 4, 6, 8, 10] * rows


def test_binary_in_and_out(net):
    image, token = np.random.default_rng(0).random((3, 3, 2), np.float32), np.arange(15).reshape(3, 5)
    names = [one["name"] for one in ask(Service({"two": net}), "GET", "/v2/models/two")[1]["outputs"]]
    request = {
        "inputs": [
            {"name": "token", "datatype": "INT64", "shape": [3, 5], "parameters": {"binary_data_size": token.nbytes}},
            {"name": "image", "datatype": "FP32", "shape": [3, 3, 2], "parameters": {"binary_data_size": image.nbytes}},
        ],
        "outputs": [{"name": names[1]}, {"name": names[0], "parameters": {"binary_data": False}}],
        "parameters": {"binary_data_output": True},
    }
    text = json.dumps(request).encode()
    whole = text + token.tobytes() + image.tobytes()
    status, answer, raw = ask(Service({"two": net}), "POST", "/v2/models/two/infer", whole, {LENGTH: str(len(text))})
    assert status == 200, answer
    double, total = answer["outputs"]
    assert double["name"] == names[1] and double["parameters"] == {"binary_data_size": token.nbytes}
    assert np.array_equal(np.frombuffer(raw, np.int64).reshape(3, 5), token * 2)
    np.testing.assert_allclose(total["data"], image.sum((1, 2)), rtol=1e-6)


def changed(which, **values):
    request = body()
    request["inputs"][which].update(values)
    return request


@pytest.mark.parametrize(
    ("request_body", "why"),
    [
        (b"", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"\xff", "no JSON"),
        (b"3", "must be a JSON object"),
        ({}, "inputs must be a list of objects, got None"),
        ({"inputs": [3]}, "inputs must be a list of objects"),
        ({"inputs": []}, "input 'image' is missing; the model's inputs are 'image', 'token'"),
        ({"inputs": body()["inputs"] * 2}, "input 'image' is there twice"),
        (changed(0, name="x"), "there is no input 'x'"),
        (changed(0, name=3), "has the name 3"),
        (changed(0, datatype="FP64"), "has datatype 'FP64', the model takes 'FP32'"),
        (changed(0, shape=[2, 3]), r"has shape [2, 3], the model takes [-1, 3, 2]"),
        (changed(0, shape=[2, 3, -2]), "whole numbers"),
        (changed(0, shape=[True, 3, 2]), "whole numbers"),
        (changed(0, shape=[2**70, 3, 2]), "whole numbers"),
        (changed(0, shape=[2**40, 3, 2]), "has 12 numbers"),
        (changed(0, shape=[3, 2, 2]), "no plan for each row of image, token of 2x2, 5: it has plans for 3x2, 5"),
        (changed(0, shape=[1, 3, 2], data=[1.0] * 6), "different numbers of rows: image has 1, token has 2"),
        (changed(0, data=[1.0]), "has 1 numbers, its shape has 12"),
        (changed(0, data="abc"), "needs data"),
        (changed(0, data=["a"] * 12), "must be numbers of FP32"),
        (changed(0, data=[None] * 12), "must be numbers of FP32"),
        (changed(0, data=[[1.0], [1.0, 2.0]]), "ragged"),
        (changed(0, data=[1e300] * 12), "which FP32 cannot hold"),
        (changed(1, data=[1.5] * 10), "must be numbers of INT64"),
        (changed(1, data=[2**63] * 10), "which INT64 cannot hold"),
        (changed(1, data=[2**200] * 10), "must be numbers of INT64"),
        (changed(0, parameters={"binary_data_size": 48}), "both data and binary_data_size"),
        (changed(0, parameters=[]), "parameters must be an object"),
        (body(outputs=[{"name": "z"}]), "there is no output 'z'"),
        (body(parameters={"timeout": -1}), "microseconds"),
        (body(parameters={"binary_data_output": 1}), "true or false"),
        (body(id=3), "id is 3"),
    ],
)
def test_a_bad_request_gets_400_and_the_reason(net, request_body, why):
    service = Service({"two": net})
    status, answer, _ = ask(service, "POST", "/v2/models/two/infer", request_body)
    assert status == 400 and why in answer["error"], answer
    assert ask(service, "POST", "/v2/models/two/infer", body())[0] == 200


@pytest.mark.parametrize(
    ("length", "size", "raw", "why"),
    [
        ("x", 48, b"", "the body has"),
        ("-1", 48, b"", "the body has"),
        ("9" * 5000, 48, b"", "the body has"),
        (None, 48, b"", "the body has 0 bytes left"),
        ("json", 48, b"\0" * 47, "the body has 47 bytes left"),
        ("json", 47, b"\0" * 47, "has 47 bytes, FP32 of shape [2, 3, 2] has 48"),
        ("json", -1, b"\0" * 48, "binary_data_size is -1"),
        ("json", 48, b"\0" * 49, "1 bytes behind the JSON belong to no input"),
    ],
)
def test_bad_binary_data(net, length, size, raw, why):
    request = changed(0, parameters={"binary_data_size": size})
    del request["inputs"][0]["data"]
    text = json.dumps(request).encode()
    headers = {} if length is None else {LENGTH: str(len(text)) if length == "json" else length}
    status, answer, _ = ask(Service({"two": net}), "POST", "/v2/models/two/infer", text + raw, headers)
    assert status == 400 and why in answer["error"]


@settings(max_examples=300)
@given(st.data())
def test_any_body_gets_an_answer(data):
    """Bytes of a good request are replaced, left out or doubled, in the JSON, the tensor and the header."""
    row = {"name": "x", "datatype": "FP32", "shape": [2, 1], "parameters": {"binary_data_size": 8}}
    other = {"name": "n", "datatype": "INT8", "shape": [2, 2], "data": [[1, -2], [3, 4]]}
    text = json.dumps({"id": "a", "inputs": [row, other], "parameters": {"timeout": 10_000_000}}).encode()
    whole, length = bytearray(text + b"\0" * 8), str(len(text))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(whole) - 1))
        new = data.draw(
            st.sampled_from([b"", b'"', b"[", b"]", b"{}", b"-", b"9" * 30, b"1e400", b"NaN", b"true", b"\xff"])
        )
        whole[place : place + data.draw(st.integers(0, 9))] = new
    headers = {LENGTH: data.draw(st.sampled_from([length, str(len(whole)), "0", "-1", "1e3", "", "٣"]))}
    specs = (Spec("x", torch.float32, (2, 1)), Spec("n", torch.int8, (2, 2)))
    engine = Engine(specs, (Spec("y", torch.float32, (2, 1)),), lambda given: [given[0] * 2])
    status, answer, _ = ask(Service({"m": engine}), "POST", "/v2/models/m/infer", bytes(whole), headers)
    assert status == 200 or (status in (400, 504) and answer["error"])


def test_other_statuses(net):
    service = Service({"two": net}, most_bytes=100)
    assert ask(service, "POST", "/v2/models/two/infer", b" " * 101)[0] == 413
    assert ask(service, "POST", "/v2/models/two/infer", b"", {"content-encoding": "gzip"})[0] == 415
    assert ask(service, "GET", "/v2/models/two/infer")[0] == 405
    assert ask(service, "GET", "/v3")[0] == 404
    assert "there are 'two'" in ask(service, "GET", "/v2/models/three")[1]["error"]
    assert ask(service, "GET", "/v2/models/two/versions/2")[0] == 404


def test_infinities_are_no_json():
    service = Service({"log": fp.compile(torch.nn.LogSigmoid(), torch.ones(1, 2), deterministic=True)})
    given = [{"name": "input", "datatype": "FP32", "shape": [1, 2], "data": [float("-inf"), 1]}]
    status, answer, _ = ask(service, "POST", "/v2/models/log/infer", {"inputs": given})
    assert status == 400 and '"binary_data": true' in answer["error"]
    parameters = {"binary_data_output": True}
    status, answer, raw = ask(service, "POST", "/v2/models/log/infer", {"inputs": given, "parameters": parameters})
    assert status == 200 and np.frombuffer(raw, np.float32)[0] == float("-inf")


class Gate:
    """A model that runs when it is let, four rows at once, and refuses negative numbers."""

    def __init__(self):
        self.open, self.runs = threading.Event(), []
        self.open.set()

    def rows(self):
        spec = Spec("x", torch.float32, (4, 1))
        return Engine((spec,), (spec,), self.run)

    def run(self, tensors):
        self.runs.append(int((tensors[0] != 0).sum()))
        assert self.open.wait(20)
        if (tensors[0] < -90).any():
            raise fp.InputError("less than -90")
        return [tensors[0] * 2]


def infer(service, value, rows=1, **more):
    row = {"name": "x", "datatype": "FP32", "shape": [rows, 1], "data": [value] * rows}
    text = json.dumps({"inputs": [row], **more}).encode()
    return asyncio.ensure_future(service.handle("POST", "/v2/models/m/infer", {}, text))


async def settled(gate, runs):
    """Wait until the model runs so often."""
    while len(gate.runs) < runs:
        await asyncio.sleep(0.005)


def value_of(answer):
    data = json.loads(answer.body)
    return data["outputs"][0]["data"] if answer.status == 200 else data["error"]


def test_requests_that_wait_run_together_and_each_gets_its_own():
    async def main():
        gate, seen = Gate(), []
        service = Service({"m": gate.rows()}, observe=lambda name, ran: seen.append((name, ran)))
        gate.runs.clear()
        gate.open.clear()
        first = infer(service, 1.0)
        await settled(gate, 1)
        others = [infer(service, value, rows) for value, rows in [(2.0, 1), (3.0, 2), (4.0, 2), (5.0, 1)]]
        await asyncio.sleep(0.01)
        gate.open.set()
        values = [value_of(await one) for one in (first, *others)]
        assert values == [[2.0], [4.0], [6.0, 6.0], [8.0, 8.0], [10.0]]
        assert gate.runs == [1, 4, 2]  # 1 + 2 + 1 rows fit into the plan, and two are left
        assert [(name, ran.requests, ran.rows, ran.waiting) for name, ran in seen] == [
            ("m", 1, 1, 1),
            ("m", 3, 4, 4),
            ("m", 1, 2, 1),
        ]

    asyncio.run(main())


def test_one_bad_request_of_a_batch_gets_its_error_alone():
    async def main():
        gate = Gate()
        service = Service({"m": gate.rows()})
        gate.runs.clear()
        gate.open.clear()
        first = infer(service, 1.0)
        await settled(gate, 1)
        others = [infer(service, value) for value in (2.0, -100.0, 3.0)]
        await asyncio.sleep(0.01)
        gate.open.set()
        answers = [await one for one in (first, *others)]
        assert [one.status for one in answers] == [200, 200, 400, 200]
        assert value_of(answers[2]) == "row 0: less than -90"

    asyncio.run(main())


def test_a_full_queue_a_deadline_a_client_that_goes_and_the_end():
    async def main():
        gate = Gate()
        service = Service({"m": gate.rows()}, queue=3, seconds=20)
        gate.runs.clear()
        gate.open.clear()
        running = infer(service, 1.0)
        await settled(gate, 1)
        late, gone, last = infer(service, 2.0, parameters={"timeout": 1000}), infer(service, 3.0), infer(service, 4.0)
        await asyncio.sleep(0.001)
        full = await infer(service, 5.0)
        assert full.status == 429 and full.headers["Retry-After"] == "1"
        assert value_of(full) == "3 requests wait for model m already: try again later"
        answer = await late
        assert answer.status == 504 and "within 0.001 s" in value_of(answer)
        gone.cancel()
        ending = asyncio.ensure_future(service.close())
        await asyncio.sleep(0.01)
        refused = await infer(service, 6.0)
        assert refused.status == 503 and "shutting down" in value_of(refused)
        assert (await service.handle("GET", "/v2/health/ready", {}, b"")).status == 503
        gate.open.set()
        assert value_of(await running) == [2.0] and value_of(await last) == [8.0]
        await ending
        assert gate.runs == [1, 1]  # neither the late one nor the one that went

    asyncio.run(main())
