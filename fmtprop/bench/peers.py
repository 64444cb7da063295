"""Other runtimes as peers of a benchmark: each turns a module into a callable on torch tensors.

A peer gets the same weights, inputs and number of threads as all contenders, and returns tensors that stay valid after
the next call. The extra ``fmtprop[bench]`` installs runtimes other than torch; they are imported when a peer is
prepared, never before. There is no fallback: a precision that the machine cannot run is an error.

Must not know timing, graphs or plans.
"""

from __future__ import annotations

import copy
import logging
import sys
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import nn

from fmtprop.errors import FmtpropError

Runnable = Callable[..., Any]


class Peer(ABC):
    """Interface of another runtime in a benchmark; picklable."""

    #: the package of the runtime
    package: ClassVar[str] = "torch"

    @property
    @abstractmethod
    def name(self) -> str:
        """Short name for messages."""

    @abstractmethod
    def prepare(self, module: nn.Module, example_inputs: Sequence[torch.Tensor], threads: int) -> Runnable:
        """Compile a module in inference mode.

        Raises FmtpropError if a package is missing, or the runtime cannot run the module or the precision on this
        machine.
        """

    def versions(self) -> dict[str, str]:
        """Return the versions of the packages that the peer uses."""
        require(self.package, self.name)
        return {self.package: version(self.package)}


@dataclass(frozen=True)
class TorchEager(Peer):
    """PyTorch without compilation."""

    #: convert the module's weights and the 4-D (5-D) inputs to channels last
    channels_last: bool = False
    #: precision of inference: a narrower one is autocast, with weights converted once
    precision: str = "f32"

    @property
    def name(self) -> str:
        """Short name for messages."""
        return _with_precision("torch channels_last" if self.channels_last else "torch", self.precision)

    def prepare(self, module: nn.Module, example_inputs: Sequence[torch.Tensor], threads: int) -> Runnable:
        """See :class:`Peer`; sets torch's threads for the whole process."""
        del example_inputs
        torch.set_num_threads(threads)
        if self.channels_last:
            module = module_in_channels_last(copy.deepcopy(module))
        module = _in_precision(module, self.precision)
        convert = in_channels_last if self.channels_last else _same

        def run(*inputs: torch.Tensor) -> Any:
            with torch.inference_mode(), autocast(self.precision):
                return module(*map(convert, inputs))

        return run


@dataclass(frozen=True)
class Inductor(Peer):
    """``torch.compile`` with frozen weights, so that they are packed once."""

    #: precision of inference: a narrower one is autocast, with weights converted once
    precision: str = "f32"

    @property
    def name(self) -> str:
        """Short name for messages."""
        return _with_precision("inductor", self.precision)

    def prepare(self, module: nn.Module, example_inputs: Sequence[torch.Tensor], threads: int) -> Runnable:
        """See :class:`Peer`; sets torch's threads for the whole process. Needs a C++ compiler."""
        torch.set_num_threads(threads)
        module = _in_precision(copy.deepcopy(module), self.precision)
        compiled = torch.compile(module, backend="inductor", options={"freezing": True})

        def run(*inputs: torch.Tensor) -> Any:
            with torch.no_grad(), autocast(self.precision):
                return compiled(*inputs)

        from fmtprop.training.pytorch import BackendCompilerFailed

        try:
            with _quiet("torch"):
                run(*example_inputs)  # compiles
        except BackendCompilerFailed as error:
            raise FmtpropError(
                f"peer {self.name}: torch.compile failed; it needs a C++ compiler (install g++ or clang++): {error}"
            ) from error
        return run


@dataclass(frozen=True)
class OnnxRuntime(Peer):
    """ONNX Runtime's CPU provider with all graph optimizations."""

    package: ClassVar[str] = "onnxruntime"

    #: ONNX file of the module. Default: exported by this peer.
    onnx: Path | None = None

    @property
    def name(self) -> str:
        """Short name for messages."""
        return "onnxruntime"

    def prepare(self, module: nn.Module, example_inputs: Sequence[torch.Tensor], threads: int) -> Runnable:
        """See :class:`Peer`."""
        ort = require("onnxruntime", self.name)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        with _onnx_file(self.onnx, module, example_inputs) as path:
            session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        names = [argument.name for argument in session.get_inputs()]

        def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
            feed = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
            return [torch.from_numpy(array) for array in session.run(None, feed)]

        return run


@dataclass(frozen=True)
class OpenVINO(Peer):
    """OpenVINO's CPU plugin, tuned for latency, one stream.

    The module is converted through ONNX instead of ``openvino.convert_model``; the latencies of both are equal.
    """

    package: ClassVar[str] = "openvino"

    precision: str = "f32"
    #: ONNX file of the module. Default: exported by this peer.
    onnx: Path | None = None

    def __post_init__(self) -> None:
        if self.precision not in ("f32", *_NARROW):
            known = ", ".join(("f32", *_NARROW))
            raise FmtpropError(f"peer openvino: precision is {self.precision!r}, must be one of {known}")

    @property
    def name(self) -> str:
        """Short name for messages."""
        return _with_precision("openvino", self.precision)

    def prepare(self, module: nn.Module, example_inputs: Sequence[torch.Tensor], threads: int) -> Runnable:
        """See :class:`Peer`."""
        ov = require("openvino", self.name)
        core = ov.Core()
        config = {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": self.precision,
        }
        with _onnx_file(self.onnx, module, example_inputs) as path:
            compiled = core.compile_model(core.read_model(str(path)), "CPU", config)
        actual = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        if actual != self.precision:
            raise FmtpropError(
                f"peer {self.name}: OpenVINO runs {actual} on this CPU although {self.precision} was asked for; "
                "leave this peer out here"
            )
        request = compiled.create_infer_request()

        def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
            # share_outputs stays off: the caller keeps the outputs, but the next run overwrites the request's memory.
            results = request.infer([tensor.numpy() for tensor in inputs], share_inputs=True)
            return [torch.from_numpy(array) for array in results.values()]

        return run


#: types of autocast, by precision
_NARROW = {"bf16": torch.bfloat16, "f16": torch.float16}

PEERS: Mapping[str, Callable[[], Peer]] = {
    "torch": TorchEager,
    "torch-channels-last": lambda: TorchEager(channels_last=True),
    "torch-bf16": lambda: TorchEager(precision="bf16"),
    "torch-f16": lambda: TorchEager(precision="f16"),
    "inductor": Inductor,
    "inductor-bf16": lambda: Inductor(precision="bf16"),
    "inductor-f16": lambda: Inductor(precision="f16"),
    "onnxruntime": OnnxRuntime,
    "openvino": OpenVINO,
    "openvino-bf16": lambda: OpenVINO(precision="bf16"),
    "openvino-f16": lambda: OpenVINO(precision="f16"),
}


def peer(name: str) -> Peer:
    """Make the peer with a name, as given on a command line.

    >>> peer("torch-channels-last").name
    'torch channels_last'
    """
    if name not in PEERS:
        raise FmtpropError(f"unknown peer {name!r}; known peers: {', '.join(PEERS)}")
    return PEERS[name]()


def export_onnx(module: nn.Module, example_inputs: Sequence[torch.Tensor], path: Path) -> None:
    """Export a module to an ONNX file, with its weights in a second file.

    `path`: file to write; ``<path>.data`` holds the weights.
    """
    require("onnx", "onnx export")
    require("onnxscript", "onnx export")
    from torch.onnx import OnnxExporterError

    try:
        # torch's exporter warns about its own deprecated functions and about missing torchvision: hide these warnings.
        with warnings.catch_warnings(), _quiet("torch.onnx"):
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            program = torch.onnx.export(module, tuple(example_inputs), dynamo=True, verbose=False)
    except OnnxExporterError as error:
        raise FmtpropError(f"onnx export: torch cannot export {type(module).__name__}: {error}") from error
    if program is None:
        raise FmtpropError(f"onnx export: torch exported nothing for {type(module).__name__}")
    program.save(path, external_data=True)


def require(package: str, peer_name: str) -> ModuleType:
    """Import a package of the extra ``bench``; OpenVINO without its usage statistics.

    OpenVINO reports every import: a new process imports the caller's main module again and waits for the network. It
    would keep a core busy for seconds during the timing.
    """
    try:
        with _blocked("openvino_telemetry"):
            return import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:  # installed, but one of its dependencies is not
            raise
        raise FmtpropError(
            f"peer {peer_name}: package {package!r} is not installed; pip install 'fmtprop[bench]'"
        ) from error


@contextmanager
def _blocked(optional: str) -> Iterator[None]:
    """Hide a package from the modules that are imported within the block."""
    if optional in sys.modules:
        yield
        return
    sys.modules[optional] = None  # type: ignore[assignment]  # makes the import fail
    try:
        yield
    finally:
        del sys.modules[optional]


@contextmanager
def _onnx_file(given: Path | None, module: nn.Module, example_inputs: Sequence[torch.Tensor]) -> Iterator[Path]:
    """Yield the given file, or an exported one that exists during the block."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="fmtprop-") as folder:
        path = Path(folder) / "model.onnx"
        export_onnx(module, example_inputs, path)
        yield path


@contextmanager
def _quiet(logger_name: str) -> Iterator[None]:
    logger = logging.getLogger(logger_name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _with_precision(name: str, precision: str) -> str:
    return name if precision == "f32" else f"{name} {precision}"


def _in_precision(module: nn.Module, precision: str) -> nn.Module:
    """Return a module with its weights in a precision; vectors (scales, biases, statistics) stay in f32."""
    if precision == "f32":
        return module
    module = copy.deepcopy(module)
    for parameter in module.parameters():
        if parameter.ndim > 1:
            parameter.data = parameter.data.to(_NARROW[precision])
    return module


def autocast(precision: str) -> AbstractContextManager[object]:
    """Return the context in which PyTorch computes in a precision."""
    return torch.autocast("cpu", _NARROW[precision]) if precision in _NARROW else nullcontext()


def module_in_channels_last(module: nn.Module) -> nn.Module:
    """Convert the weights in place; ``Module.to(memory_format=...)`` refuses a mix of 4-D and 5-D weights."""
    for parameter in module.parameters():
        parameter.data = in_channels_last(parameter.data)
    return module


def in_channels_last(tensor: torch.Tensor) -> torch.Tensor:
    """Return images or volumes in channels-last; another tensor as it is."""
    if tensor.ndim == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor.contiguous(memory_format=torch.channels_last_3d) if tensor.ndim == 5 else tensor


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
