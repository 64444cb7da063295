"""The Open Inference Protocol v2: requests to tensors, tensors to responses, with the extension for binary tensors.

Pure: bytes in, bytes out. It trusts nothing of a request, and knows neither a server nor a plan.

References
----------
https://github.com/open-inference/open-inference-protocol (REST), and Triton's extensions for binary data and for the
parameter ``timeout``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from fmtprop.errors import InputError
from fmtprop.ir.tensors import row_major_bytes
from fmtprop.serving.engine import Spec

#: the header that has the length of the JSON before binary tensors, in bytes
LENGTH_HEADER = "Inference-Header-Content-Length"

#: the only version of each model
VERSION = "1"

_DTYPES = {
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
    "UINT16": torch.uint16,
    "UINT32": torch.uint32,
    "UINT64": torch.uint64,
    "INT8": torch.int8,
    "INT16": torch.int16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
    "FP32": torch.float32,
    "FP64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

#: kinds of numpy's types that a datatype takes from JSON: booleans, integers, floats
_KINDS = {"BOOL": "b", "FP16": "iuf", "BF16": "iuf", "FP32": "iuf", "FP64": "iuf"}


class RequestError(InputError):
    """A request that gets no result.

    Parameters
    ----------
    status : int
        The HTTP status: 4xx if the request is wrong, 503 if the server does not take any, 504 if its time is over.
    message : str
        The reason, for the client.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> Any:
        return RequestError, (self.status, str(self))


@dataclass(frozen=True)
class Request:
    """A request for inference."""

    id: str | None
    #: in the order of the model's inputs
    tensors: list[torch.Tensor]
    #: wanted results, and whether as binary data
    outputs: list[tuple[str, bool]]
    seconds: float | None


def route(method: str, path: str) -> tuple[str, str | None]:
    """Return what a path asks for, and the model: live, ready, server, model, model_ready, infer.

    >>> route("POST", "/v2/models/resnet50/infer")
    ('infer', 'resnet50')
    """
    kind, model = _asked(path.strip("/").split("/"))
    if kind is None:
        raise RequestError(404, f"there is nothing at {path}: the Open Inference Protocol v2 begins at /v2")
    wanted = "POST" if kind == "infer" else "GET"
    if method != wanted:
        raise RequestError(405, f"{path} takes {wanted}, got {method}")
    return kind, model


def _asked(parts: Sequence[str]) -> tuple[str | None, str | None]:
    match parts:
        case ["v2"]:
            return "server", None
        case ["v2", "health", "live" | "ready" as kind]:
            return kind, None
        case ["v2", "models", model, "versions", version, *rest]:
            if version != VERSION:
                raise RequestError(404, f"model {model} has no version {version!r}, only {VERSION!r}")
            return _asked(["v2", "models", model, *rest])
        case ["v2", "models", model]:
            return "model", model
        case ["v2", "models", model, "ready"]:
            return "model_ready", model
        case ["v2", "models", model, "infer"]:
            return "infer", model
    return None, None


def server_metadata(version: str) -> dict[str, Any]:
    """Return the answer to ``GET /v2``."""
    return {"name": "fmtprop", "version": version, "extensions": ["binary_tensor_data"]}


def model_metadata(name: str, inputs: Sequence[Spec], outputs: Sequence[Spec]) -> dict[str, Any]:
    """Return the answer to ``GET /v2/models/NAME``; -1 is a size that requests choose."""
    return {
        "name": name,
        "versions": [VERSION],
        "platform": "fmtprop_plan",
        "inputs": [_described(spec) for spec in inputs],
        "outputs": [_described(spec) for spec in outputs],
    }


def _described(spec: Spec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": _NAMES[spec.dtype], "shape": list(spec.dims)}


# ---------------------------------------------------------------------------------------------- requests


def decode(body: bytes, header_length: str | None, inputs: Sequence[Spec], outputs: Sequence[Spec]) -> Request:
    """Return a request.

    `header_length`: value of the header ``Inference-Header-Content-Length``; without it, all of the body is JSON.
    """
    end = len(body)
    if header_length is not None:
        if not (header_length.isascii() and header_length.isdigit()) or not int(header_length[:20]) <= len(body):
            raise RequestError(400, f"{LENGTH_HEADER} is {header_length[:40]!r}, the body has {len(body)} bytes")
        end = int(header_length)
    data = _parsed(body[:end])
    binary = _Binary(memoryview(body)[end:])
    given = {}
    for row in _objects(data, "inputs", required=True):
        name = _text_of(row, "name", "an input")
        if name in given:
            raise RequestError(400, f"input {name!r} is there twice")
        spec = next((one for one in inputs if one.name == name), None)
        if spec is None:
            raise RequestError(400, f"there is no input {name!r}; the model's inputs are {_listed(inputs)}")
        given[name] = _tensor(row, spec, binary)
    binary.check_end()
    missing = [spec.name for spec in inputs if spec.name not in given]
    if missing:
        raise RequestError(400, f"input {missing[0]!r} is missing; the model's inputs are {_listed(inputs)}")
    tensors = [given[spec.name] for spec in inputs]
    return Request(_id(data), tensors, _wanted(data, outputs), _seconds(data))


class _Binary:
    """The bytes behind the JSON, taken in the order of the inputs."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._taken = data, 0

    def take(self, name: str, size: Any) -> bytearray:
        left = len(self._data) - self._taken
        if not _is_count(size) or size > left:
            raise RequestError(400, f"input {name!r}: binary_data_size is {size!r}, the body has {left} bytes left")
        self._taken += size
        return bytearray(self._data[self._taken - size : self._taken])  # a copy, since PyTorch wants it writable

    def check_end(self) -> None:
        if self._taken != len(self._data):
            raise RequestError(400, f"{len(self._data) - self._taken} bytes behind the JSON belong to no input")


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the request is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise RequestError(400, "the request must be a JSON object")
    return data


def _tensor(row: dict[str, Any], spec: Spec, binary: _Binary) -> torch.Tensor:
    name, datatype = spec.name, row.get("datatype")
    if datatype != _NAMES[spec.dtype]:
        raise RequestError(400, f"input {name!r} has datatype {datatype!r}, the model takes {_NAMES[spec.dtype]!r}")
    shape = row.get("shape")
    if not isinstance(shape, list) or not all(_is_count(size) for size in shape):
        raise RequestError(400, f"input {name!r} has shape {_short(shape)}: it must be a list of whole numbers")
    if len(shape) != len(spec.dims):
        raise RequestError(400, f"input {name!r} has shape {_short(shape)}, the model takes {list(spec.dims)}")
    count = prod(shape)
    size = _parameters(row).get("binary_data_size")
    if size is None:
        return torch.from_numpy(_numbers(row, name, datatype, count)).to(spec.dtype).reshape(shape)
    if "data" in row:
        raise RequestError(400, f"input {name!r} has both data and binary_data_size")
    raw = binary.take(name, size)
    if len(raw) != count * spec.dtype.itemsize:
        raise RequestError(
            400, f"input {name!r} has {len(raw)} bytes, {datatype} of shape {shape} has {count * spec.dtype.itemsize}"
        )
    if spec.dtype == torch.bool and raw.strip(b"\0\1"):
        raise RequestError(400, f"input {name!r}: a byte of BOOL is 0 or 1")
    return torch.frombuffer(raw, dtype=spec.dtype).reshape(shape) if raw else torch.empty(shape, dtype=spec.dtype)


def _numbers(row: dict[str, Any], name: str, datatype: str, count: int) -> np.ndarray[Any, Any]:
    """Return numbers from JSON, all of which the datatype can hold, flat."""
    data = row.get("data")
    if not isinstance(data, list):
        raise RequestError(400, f"input {name!r} needs data, a list of numbers, or the parameter binary_data_size")
    try:
        array = np.asarray(data)
    except ValueError as error:
        raise RequestError(400, f"input {name!r}: data is ragged: {error}") from error
    if array.size != count:
        raise RequestError(400, f"input {name!r} has {array.size} numbers, its shape has {count}")
    if not count:
        return np.zeros(0, np.float32)
    if array.dtype.kind not in _KINDS.get(datatype, "iu"):
        raise RequestError(400, f"input {name!r}: data must be numbers of {datatype}")
    dtype = _DTYPES[datatype]
    finite = array[np.isfinite(array)]
    if dtype != torch.bool and finite.size:
        low, high = finite.min().item(), finite.max().item()
        limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        if low < limits.min or high > limits.max:
            raise RequestError(400, f"input {name!r} has numbers from {low} to {high}, which {datatype} cannot hold")
    return np.ascontiguousarray(array.reshape(-1))


def _wanted(data: dict[str, Any], outputs: Sequence[Spec]) -> list[tuple[str, bool]]:
    usual = _flag(_parameters(data), "binary_data_output", default=False)
    rows = _objects(data, "outputs", required=False)
    wanted = []
    for row in rows:
        name = _text_of(row, "name", "an output")
        if name not in {spec.name for spec in outputs}:
            raise RequestError(400, f"there is no output {name!r}; the model's outputs are {_listed(outputs)}")
        wanted.append((name, _flag(_parameters(row), "binary_data", default=usual)))
    return wanted or [(spec.name, usual) for spec in outputs]


def _seconds(data: dict[str, Any]) -> float | None:
    """Return the time that a client gives, which is in microseconds, as Triton's is."""
    given = _parameters(data).get("timeout")
    if given is None:
        return None
    if not _is_count(given):
        raise RequestError(400, f"parameter timeout is {_short(given)}: it must be a whole number of microseconds")
    return float(given) / 1e6


def _id(data: dict[str, Any]) -> str | None:
    given = data.get("id")
    if given is not None and not isinstance(given, str):
        raise RequestError(400, f"id is {_short(given)}: it must be a string")
    return given


def _objects(data: dict[str, Any], key: str, *, required: bool) -> list[dict[str, Any]]:
    rows = data.get(key, None if required else [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise RequestError(400, f"{key} must be a list of objects, got {_short(rows)}")
    return rows


def _parameters(row: dict[str, Any]) -> dict[str, Any]:
    given = row.get("parameters", {})
    if not isinstance(given, dict):
        raise RequestError(400, f"parameters must be an object, got {_short(given)}")
    return given


def _flag(parameters: dict[str, Any], key: str, *, default: bool) -> bool:
    given = parameters.get(key, default)
    if not isinstance(given, bool):
        raise RequestError(400, f"parameter {key} is {_short(given)}: it must be true or false")
    return given


def _text_of(row: dict[str, Any], key: str, what: str) -> str:
    if not isinstance(row.get(key), str):
        raise RequestError(400, f"{what} has the {key} {_short(row.get(key))}: it must be a string")
    return str(row[key])


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _listed(specs: Sequence[Spec]) -> str:
    return ", ".join(repr(spec.name) for spec in specs)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


# ---------------------------------------------------------------------------------------------- responses


def encode(model: str, request: Request, results: Mapping[str, torch.Tensor]) -> tuple[dict[str, str], bytes]:
    """Return the headers and the body of a response."""
    rows, raws = [], []
    for name, is_binary in request.outputs:
        tensor = results[name].detach()
        row: dict[str, Any] = {"name": name, "datatype": _NAMES[tensor.dtype], "shape": list(tensor.shape)}
        if is_binary:
            raws.append(row_major_bytes(tensor).numpy().tobytes())
            row["parameters"] = {"binary_data_size": len(raws[-1])}
        else:
            if tensor.is_floating_point() and not tensor.isfinite().all():
                raise RequestError(
                    400,
                    f"result {name!r} has infinities or NaN, which JSON cannot hold: ask for it as binary data, by its "
                    'parameters {"binary_data": true}',
                )
            row["data"] = tensor.reshape(-1).tolist()
        rows.append(row)
    answer = {"model_name": model, "model_version": VERSION, "outputs": rows}
    if request.id is not None:
        answer["id"] = request.id
    text = json.dumps(answer).encode()
    if not raws:
        return {"Content-Type": "application/json"}, text
    headers = {"Content-Type": "application/octet-stream", LENGTH_HEADER: str(len(text))}
    return headers, b"".join((text, *raws))
