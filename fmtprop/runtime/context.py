"""One execution context: an arena, memory objects over it, and the prebuilt calls of every step.

A context serves one run at a time; concurrent runs of a plan use one each and share the constants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from math import inf
from time import perf_counter
from typing import Protocol

import torch

from fmtprop import dnnl
from fmtprop.errors import DnnlError, PlanError
from fmtprop.jit import Call, CallList, StandaloneWork, no_code
from fmtprop.runtime.boundary import Port, write_out
from fmtprop.runtime.calls import PyTorchCalls, as_planned, bind
from fmtprop.runtime.plan import Access, Home, Plan, Step
from fmtprop.targets.arguments import arguments, start_of
from fmtprop.targets.kernels import JIT
from fmtprop.targets.memory import huge_bytes, view, view_of_tensor
from fmtprop.targets.tail import tail_of


class Context:
    """Memory and calls of one run.

    Parameters
    ----------
    plan : Plan
        What to run.
    arena : torch.Tensor, optional
        Memory for the activations, on pages that have been written; by default its own.
    """

    def __init__(self, plan: Plan, arena: torch.Tensor | None = None) -> None:
        self.plan = plan
        self._engine = dnnl.Engine.cpu()
        self._stream = dnnl.Stream(self._engine)
        self._is_asynchronous = dnnl.lib().runtime == "SYCL"
        self._arena = huge_bytes(plan.arena_nbytes) if arena is None else arena
        #: buffer -> the memory objects that look into the caller's tensor of the current run
        self._external = {i: _External() for i, b in enumerate(plan.buffers) if b.home in (Home.INPUT, Home.OUTPUT)}
        self._keep: list[object] = []
        #: the calls of each step
        self._steps = [self._calls_of(step, index) for index, step in enumerate(plan.steps)]
        #: of the calls, those in a row that are native
        self._lists: list[CallList] = []
        self._calls = self._joined([call for calls in self._steps for call in calls])
        self._has_pytorch = any(isinstance(call[0], PyTorchCalls) for call in self._calls)
        self._inputs = [self._external.get(buffer) for _, _, buffer in plan.inputs]
        self._outputs = [self._output(name, access) for name, access in plan.outputs]

    def run(self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Execute every step.

        Parameters
        ----------
        inputs : sequence of torch.Tensor
            Checked, as the plan reads them.
        out : sequence of torch.Tensor, optional
            Checked tensors for the results.

        Returns
        -------
        list of torch.Tensor
            ``out``, or new tensors that are the caller's to keep.
        """
        self._bind(inputs, out)
        if self._has_pytorch:
            with as_planned():
                self._execute()
        else:
            self._execute()
        if self._is_asynchronous:
            self._stream.wait()
        return self._results(out)

    def profile(self, inputs: Sequence[torch.Tensor], limit: float = inf) -> tuple[list[torch.Tensor], list[float]]:
        """Execute like :meth:`run`, step by step, and return the seconds of each step beside the results.

        No step begins once the limit, in seconds, is over; there is no result then.
        """
        self._bind(inputs, None)
        seconds: list[float] = []
        end = perf_counter() + limit
        with as_planned():
            for calls in self._steps:
                start = perf_counter()
                if start > end:
                    self._unbind()
                    return [], seconds
                for function, a, b, c, d in calls:
                    status = function(a, b, c, d)
                    self._stream.wait()
                    if status:
                        self._fail(d, status)
                seconds.append(perf_counter() - start)
        return self._results(None), seconds

    def close(self) -> None:
        """Release the native objects."""
        for item in self._keep:
            close = getattr(item, "close", None)
            if close is not None:
                close()
        self._calls.clear()
        self._lists.clear()
        self._steps.clear()
        self._stream.close()

    # ------------------------------------------------------------------ a run

    def _execute(self) -> None:
        for function, a, b, c, d in self._calls:
            status = function(a, b, c, d)
            if status:
                self._fail(d, status)

    def _bind(self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None) -> None:
        """Point the external memories at this run's tensors."""
        for external, tensor in zip(self._inputs, inputs, strict=True):
            if external is not None:
                external.point(tensor)
        for index, output in enumerate(self._outputs):
            if output.external is not None:
                given = out[index] if out is not None and output.port.holds(out[index]) else None
                output.external.point(given if given is not None else output.new())

    def _results(self, out: Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
        results = []
        for index, output in enumerate(self._outputs):
            result = self._tensor(output.access) if output.external is None else output.external.tensor
            if out is not None:
                given = out[index]
                if result is not given:
                    write_out(given, result)
                result = given
            elif output.external is None:
                result = output.new().copy_(result)  # a clone would close gaps between elements
            results.append(result)
        self._unbind()
        return results

    def _unbind(self) -> None:
        for external in self._external.values():
            external.tensor = _NOTHING

    def _fail(self, array: object, status: int) -> None:
        if array is None:  # a list: it stopped where one of its calls failed
            array = next(call[4] for call in (calls.reached for calls in self._lists) if call is not None)
        step = next(step for step, calls in zip(self.plan.steps, self._steps, strict=True) if calls[0][4] is array)
        pd = step.primitive.desc
        raise DnnlError(
            "dnnl_primitive_execute", dnnl.status_name(status), f"{step.node.label} with {pd.impl}", pd.repro
        )

    # ------------------------------------------------------------------ building

    def _output(self, name: str, access: Access) -> _Output:
        is_written = self.plan.buffers[access.buffer].home is Home.OUTPUT
        return _Output(Port(name, access.desc), access, self._external[access.buffer] if is_written else None)

    def _calls_of(self, step: Step, index: int) -> list[Call]:
        if step.target == JIT:
            return [self._kernel_call(step)]
        if step.primitive is None:
            read = [a if self.plan.buffers[a.buffer].last > index else None for a in step.results]
            return [(PyTorchCalls([(step.node, self._pytorch_call(step, read))]), None, None, None, None)]
        places = _places(step)
        pd = step.primitive.desc
        bound = [(number, self._memory(places[name], md)) for name, number, md in arguments(step.node, pd)]
        if step.scratchpad is not None:
            md = pd.query_md("scratchpad")
            pointer = self._arena.data_ptr() + self.plan.buffers[step.scratchpad].offset
            bound.append((dnnl.Arg.SCRATCHPAD, dnnl.Memory(self._engine, md, pointer)))
        call = dnnl.ExecArgs(bound)
        self._keep += [memory for _, memory in bound]
        self._keep.append(call)
        calls: list[Call] = [(dnnl.hot_execute, step.primitive.handle, self._stream.handle, call.count, call.array)]
        work = tail_of(step.node)
        if work is not None:
            # a source of a concat in place begins where its part of the buffer does, of which its node knows nothing
            self._point_at_first(work, step.results[0])
            self._keep.append(work)
            calls.append(work.call)
        return calls

    def _kernel_call(self, step: Step) -> Call:
        """Return the call of a kernel that runs instead of a primitive."""
        choice = step.node.choice
        if choice is None:
            raise PlanError(f"{step.node.label} has no choice: assign formats before running")
        work: StandaloneWork = choice.handle.work(self.plan.threads)
        for name, access in _places(step).items():
            self._point_at_first(work.pointers[name], access)
        self._keep.append(work)
        return work.call

    def _joined(self, calls: Sequence[Call]) -> list[Call]:
        """Return the same calls, native ones in a row as one."""
        if no_code():
            return list(calls)
        joined: list[Call] = []
        for is_python, some in groupby(calls, key=lambda call: isinstance(call[0], PyTorchCalls)):
            if is_python:
                pairs = [pair for call in some if isinstance(call[0], PyTorchCalls) for pair in call[0].pairs]
                joined.append((PyTorchCalls(pairs), None, None, None, None))
            else:
                self._lists.append(CallList(list(some)))
                joined.append(self._lists[-1].call)
        return joined

    def _memory(self, access: Access, md: dnnl.NativeDesc) -> dnnl.Memory:
        memory = dnnl.Memory(self._engine, md, None)
        self._point(memory, access, start_of(access.desc, md))
        return memory

    def _point_at_first(self, memory: _Movable, access: Access) -> None:
        """Point a kernel's operand at the first element of a tensor."""
        self._point(memory, access, access.desc.offset0 * access.desc.dtype.nbytes)

    def _point(self, memory: _Movable, access: Access, start: int) -> None:
        """Point something at what begins so many bytes behind a buffer's start, now or before each run."""
        buffer = self.plan.buffers[access.buffer]
        if buffer.home is Home.ARENA:
            memory.set_data_handle(self._arena.data_ptr() + buffer.offset + start)
        elif buffer.home is Home.CONSTANT:
            memory.set_data_handle(self.plan.constants[buffer.index].data_ptr() + start)
        else:
            self._external[access.buffer].views.append((memory, start))

    def _tensor(self, access: Access) -> torch.Tensor:
        buffer = self.plan.buffers[access.buffer]
        if buffer.home is Home.ARENA:
            return view(self._arena, access.desc, buffer.offset)
        if buffer.home is Home.CONSTANT:
            return view(self.plan.constants[buffer.index], access.desc)
        return view_of_tensor(self._external[access.buffer].tensor, access.desc)

    def _pytorch_call(self, step: Step, read: Sequence[Access | None]) -> Callable[[], object]:
        """Return the call of a step that PyTorch runs: on the same tensors in each run, or on those of the run."""
        operands = {name: self._lasting(access) for name, access in step.operands.items()}
        places = [None if access is None else self._lasting(access) for access in read]
        if not self._external.keys() & {access.buffer for access in (*step.operands.values(), *step.results)}:
            return bind(step.node, {name: self._tensor(access) for name, access in step.operands.items()}, places)

        def run() -> object:
            given = {
                name: self._tensor(step.operands[name]) if tensor is None else tensor
                for name, tensor in operands.items()
            }
            written = [
                self._tensor(access) if tensor is None and access is not None else tensor
                for tensor, access in zip(places, read, strict=True)
            ]
            return bind(step.node, given, written)()

        return run

    def _lasting(self, access: Access) -> torch.Tensor | None:
        """Return the tensor that is the same in each run; None for one of the caller's."""
        return None if access.buffer in self._external else self._tensor(access)


class _Movable(Protocol):
    """What can be pointed at other memory."""

    def set_data_handle(self, pointer: int) -> None:
        """Point it there."""


def _places(step: Step) -> dict[str, Access]:
    """Return where a step's operands and results lie, by name."""
    return {**step.operands, **dict(zip(("dst", "dst_1", "dst_2"), step.results, strict=False))}


class _External:
    """A buffer that is the caller's tensor of the current run, and the memory objects that look into it."""

    __slots__ = ("_pointer", "tensor", "views")

    def __init__(self) -> None:
        self.tensor = _NOTHING
        #: memory objects, and bytes from the tensor's start to where each begins
        self.views: list[tuple[_Movable, int]] = []
        self._pointer = 0

    def point(self, tensor: torch.Tensor) -> None:
        """Make a tensor the current one."""
        self.tensor = tensor
        pointer = tensor.data_ptr()
        if pointer != self._pointer:  # allocators tend to give the same memory again
            for memory, start in self.views:
                memory.set_data_handle(pointer + start)
            self._pointer = pointer


class _Output:
    """An output: whether it is the caller's own tensor that results are written to, and how to make one.

    Parameters
    ----------
    port : Port
        What the tensor looks like.
    access : Access
        Where the plan leaves the result.
    external : _External or None
        The caller's tensor; None where the result lies in a buffer of the plan or in an input, and is copied.
    """

    __slots__ = ("_like", "access", "external", "port")

    def __init__(self, port: Port, access: Access, external: _External | None) -> None:
        self.port, self.access, self.external = port, access, external
        # gives type and device to new tensors, whatever the caller's default device is
        self._like = torch.empty(0, dtype=port.dtype, device="cpu")

    def new(self) -> torch.Tensor:
        """Return a new tensor for the result."""
        return self._like.new_empty_strided(self.port.dims, self.port.strides)


#: what a buffer of the caller's holds between runs, so that nobody's tensors are kept
_NOTHING = torch.empty(0, device="cpu")
