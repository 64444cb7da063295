"""Tracer of PyTorch's operators and of oneDNN's executions in each.

oneDNN writes its log to the process's standard output, which goes to a temporary file around each operator. The log
in this file belongs to the operator, to the module with the running ``forward``, and to the calling line. An operator
of autograd's backward pass belongs to the module and the line of the forward pass that it differentiates.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from time import perf_counter, time
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fmtprop.dnnl.output import flush_output
from fmtprop.errors import FmtpropError
from fmtprop.lens.pytorch import current_node, next_number
from fmtprop.ops.pytorch import TorchDispatchMode
from fmtprop.verbose import Execution, executions_of
from fmtprop.verbose.parse import MARKER

#: folder of PyTorch's files: their lines are not the user's
_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(__file__) + os.sep
#: most calls that are kept
_MOST = 1_000_000
#: most places of a thread that are kept for the backward pass: those of the newest operators
_MOST_PLACES = 200_000
#: most outermost modules that are kept
_MOST_SUBJECTS = 4
#: a thread's longest wait for an operator of another thread, which may be waiting for this thread
_WAIT_SECONDS = 10.0


@dataclass(frozen=True)
class OperatorCall:
    """One call of an operator in which oneDNN executed something."""

    operator: str
    #: `module`, `kind`: the module's path below the outermost one, and its class; empty outside modules
    module: str
    kind: str
    #: ``file:line`` of the user's program
    line: str
    executions: tuple[Execution, ...]
    #: `start_seconds`, `seconds`: its beginning, in seconds since 1970, and its time
    start_seconds: float
    seconds: float
    #: the operating system's number of the thread
    thread: int


class _Place(NamedTuple):
    """A module's path, its class, and a line."""

    module: str
    kind: str
    line: str


class _Modules(threading.local):
    """The running modules of each thread: path and class, the innermost last; and the places of its operators.

    Autograd numbers the differentiable operators of a thread. The operator of the backward pass has the number of its
    operator of the forward pass.
    """

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.stack: list[tuple[str, str]] = []
        self.places: dict[int, _Place] = {}
        self.subject: CalledModule | None = None

    def place(self) -> _Place:
        """Return the place of the operator that is called now."""
        node = current_node() if not self.stack else None
        place = self.places.get(node._sequence_nr()) if node is not None else None
        if place is None:
            place = _Place(*(self.stack[-1] if self.stack else ("", "")), _line())
        # a differentiable operator has just got its number; any other one finds a number that has its place already
        self.places.setdefault(next_number() - 1, place)
        if len(self.places) > _MOST_PLACES:
            del self.places[next(iter(self.places))]
        return place


@dataclass
class CalledModule:
    """A module that a program calls, with the arguments of its last call."""

    module: torch.nn.Module
    inputs: tuple[Any, ...]
    keywords: dict[str, Any]
    #: time of the reorders in its calls
    seconds: float = 0.0


@dataclass
class Tracer:
    """Collects calls."""

    calls: list[OperatorCall] = field(default_factory=list)
    _subjects: dict[int, CalledModule] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._modules = _Modules()

    @contextmanager
    def watching(self, *, threads: bool = False) -> Iterator[Tracer]:
        """Watch the operators that this thread calls in the block.

        Executions without a watcher, such as those of a forked process, stay in the standard output.

        Raises FmtpropError if PyTorch has no oneDNN, or its log cannot be switched on.
        """
        with ExitStack() as stack:
            sink = stack.enter_context(tempfile.TemporaryFile(mode="w+b", buffering=0))
            stack.enter_context(logging())
            before = register_module_forward_pre_hook(self._enter)
            stack.callback(before.remove)
            after = register_module_forward_hook(self._leave, always_call=True)
            stack.callback(after.remove)
            watch = _Watch(self, sink)
            stack.enter_context(watch)
            if threads:
                stack.callback(threading.setprofile, threading.getprofile())
                threading.setprofile(watch.join)
            yield self

    def place(self) -> _Place:
        """Return the place of the operator that this thread calls now."""
        return self._modules.place()

    def add(self, operator: str, place: _Place, text: str, start_seconds: float, seconds: float) -> None:
        """Record oneDNN's log of an operator; give standard output the lines that other threads wrote."""
        lines = text.splitlines(keepends=True)
        found = tuple(one for line in lines for one in executions_of(line))
        if found:
            if self._modules.subject is not None:
                self._modules.subject.seconds += sum(one.seconds for one in found if one.kind == "reorder")
            thread = threading.get_native_id()
            self.calls.append(OperatorCall(operator, *place, found, start_seconds, seconds, thread))
        if others := "".join(line for line in lines if MARKER.search(line) is None):
            os.write(1, others.encode())

    @property
    def subject(self) -> CalledModule | None:
        """The outermost module with the costliest reorders; None if no module has any."""
        found = max(self._subjects.values(), key=lambda one: one.seconds, default=None)
        return found if found is not None and found.seconds else None

    def _subject(self, module: torch.nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> CalledModule:
        known = self._subjects.setdefault(id(module), CalledModule(module, inputs, keywords))
        known.inputs, known.keywords = inputs, keywords
        while len(self._subjects) > _MOST_SUBJECTS:  # they keep their modules in memory
            others = (key for key, one in list(self._subjects.items()) if one is not known)
            del self._subjects[min(others, key=lambda key: self._subjects[key].seconds)]
        return known

    def _enter(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        running = self._modules
        # a checkpoint that runs again in the backward pass is a part of the model that ran last
        if not running.stack and current_node() is None:
            running.names = {id(part): name for name, part in module.named_modules(remove_duplicate=True)}
            # hooks of all modules are not given keywords: PyTorch's call of this one has them
            keywords = sys._getframe(1).f_locals.get("kwargs")
            running.subject = self._subject(module, inputs, dict(keywords or {}))
        running.stack.append((running.names.get(id(module), type(module).__name__), type(module).__name__))

    def _leave(self, module: torch.nn.Module, _: Any, result: Any) -> None:
        if self._modules.stack:
            self._modules.stack.pop()
        if not self._modules.stack:
            self._modules.subject = None


class _Patience(threading.local):
    """How long a thread waits for its turn: never again after it did not get it."""

    seconds = _WAIT_SECONDS


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, tracer: Tracer, sink: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracer, self._sink = tracer, sink
        self._process, self._turn, self._patience = os.getpid(), threading.Lock(), _Patience()

    def join(self, *_: Any) -> None:
        """Watch this thread, too: the profile function of a new thread."""
        sys.setprofile(None)
        self.__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if os.getpid() != self._process or len(self._tracer.calls) >= _MOST or self._sink.closed:
            return func(*args, **kwargs)
        if not self._turn.acquire(timeout=self._patience.seconds):
            self._patience.seconds = 0
            return func(*args, **kwargs)
        try:
            place = self._tracer.place()
            with output_of(self._sink) as read:
                start_seconds, start = time(), perf_counter()
                result = func(*args, **kwargs)
                seconds = perf_counter() - start
            self._tracer.add(str(func), place, read(), start_seconds, seconds)
        finally:
            self._turn.release()
        return result


@contextmanager
def logging() -> Iterator[None]:
    """Switch on the log of PyTorch's own oneDNN."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        raise FmtpropError("this PyTorch has no oneDNN (torch.backends.mkldnn.is_available() is False): nothing to see")
    # the first line of a process that is logged decides for all of them
    os.environ.setdefault("ONEDNN_VERBOSE_TIMESTAMP", "1")
    try:
        switch = torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON)  # type: ignore[no-untyped-call]
        with switch:
            yield
    except RuntimeError as error:
        if "verbose mode" not in str(error):
            raise
        raise FmtpropError(f"PyTorch's oneDNN has no log: {error}") from error


@contextmanager
def output_of(sink: Any) -> Iterator[Any]:
    """Redirect standard output to a file in the block; yield a function that reads it afterwards."""
    flush_output()
    try:
        keep = os.dup(1)
    except OSError:  # the program has closed it
        keep = os.open(os.devnull, os.O_WRONLY)
    sink.seek(0)
    sink.truncate()
    os.dup2(sink.fileno(), 1)

    def read() -> str:
        sink.seek(0)
        text: str = sink.read().decode("utf-8", errors="replace")
        return text

    try:
        yield read
    finally:
        flush_output()
        os.dup2(keep, 1)
        os.close(keep)


def _line() -> str:
    """Return the innermost line that is neither PyTorch's nor ours; if there is none, the outermost line."""
    frame = sys._getframe(1)
    last = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_TORCH, _OURS, "<frozen")) and "contextlib" not in name:
            return f"{name}:{frame.f_lineno}"
        last = f"{name}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return last
