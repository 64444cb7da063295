"""Running a plan whose steps pass PyTorch tensors from slot to slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

import torch

from fmtprop import dnnl
from fmtprop.runtime.boundary import Boundary, Port, write_out
from fmtprop.runtime.executor import Executor
from fmtprop.runtime.plan import Access, Home, Plan, Step
from fmtprop.runtime.tensor_calls import function_of, viewed
from fmtprop.runtime.threads import running_with

__all__ = ["TensorExecutor", "executor_of"]


def executor_of(plan: Plan, *, checked: bool = True) -> Executor | TensorExecutor:
    """Return what runs a plan; ``checked`` as for :class:`~fmtprop.runtime.executor.Executor`."""
    return TensorExecutor(plan) if plan.passes_tensors else Executor(plan, checked=checked)


class _Call(NamedTuple):
    """One function call: the slots that it reads and writes, and those that nobody reads after it."""

    function: Callable[..., Any]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    frees: tuple[int, ...]


class TensorExecutor:
    """Runs one plan of PyTorch operators, from any number of threads at once.

    Parameters
    ----------
    plan : Plan
        Made by :func:`~fmtprop.runtime.tensor_plan.build_tensor_plan`.

    Notes
    -----
    A run keeps its tensors to itself, so that runs share nothing but the constants. PyTorch's operators read the number
    of threads at every call. In a forked child, whose OpenMP threads did not survive, runs go to a thread of its own.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._boundary = Boundary(
            plan.name,
            tuple(Port(name, desc) for name, desc, _ in plan.inputs),
            tuple(Port(name, access.desc) for name, access in plan.outputs),
        )
        program = _Program(plan)
        self._slots, self._inputs, self._outputs = program.slots, program.inputs, program.outputs
        self._steps = program.steps
        self._calls = [call for calls in program.steps for call in calls]

    def run(
        self,
        inputs: Sequence[object],
        out: torch.Tensor | Sequence[torch.Tensor] | None = None,
        threads: int | None = None,
    ) -> list[torch.Tensor]:
        """Execute the plan.

        Parameters
        ----------
        inputs : sequence of torch.Tensor
            One for each graph input: dense with any strides, or an mkldnn tensor.
        out : torch.Tensor or sequence of torch.Tensor, optional
            One for each graph output, to write the results to; any strides.
        threads : int, optional
            How many to run with, if not as torch does in the calling thread.

        Returns
        -------
        list of torch.Tensor
            The tensors of ``out``, or new ones.

        Raises
        ------
        InputError
            Number, shape, data type or device of the tensors does not fit, or one of ``out`` overlaps another.
        """
        tensors = self._boundary.read(inputs)
        targets = self._boundary.check_out(out, inputs) if out is not None else None
        results: list[torch.Tensor] = self._guarded(lambda: self._run_with(tensors, threads))
        if targets is None:
            return results
        for target, result in zip(targets, results, strict=True):
            write_out(target, result)
            torch.autograd.graph.increment_version(target)  # for graphs that saved the tensor
        return targets

    def profile(self, inputs: Sequence[object]) -> tuple[list[torch.Tensor], list[float]]:
        """Execute the plan once and return the seconds of each step beside the results."""
        tensors = self._boundary.read(inputs)
        outcome: tuple[list[torch.Tensor], list[float]] = self._guarded(lambda: self._profile(tensors))
        return outcome

    def prepare(self, threads: int) -> Plan:
        """Return the plan for a number of threads: the same for all."""
        return replace(self.plan, threads=threads)

    def close(self) -> None:
        """Do nothing: there are no native objects to release."""

    @staticmethod
    def _guarded(work: Callable[[], Any]) -> Any:
        """Run outside of the caller's autograd and autocast, and where parallel regions work."""
        with torch.no_grad():
            if torch.is_autocast_enabled("cpu"):
                with torch.autocast("cpu", enabled=False):
                    return TensorExecutor._guarded(work)
            return dnnl.after_fork(work) if dnnl.fork_guard() else work()

    def _start(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        slots = list(self._slots)
        for slot, tensor in zip(self._inputs, tensors, strict=True):
            if slot >= 0:
                slots[slot] = tensor
        return slots

    def _run_with(self, tensors: Sequence[torch.Tensor], threads: int | None) -> list[torch.Tensor]:
        if threads is None or threads == torch.get_num_threads():
            return self._run(tensors)
        with running_with(threads):
            return self._run(tensors)

    def _run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        slots = self._start(tensors)
        for call in self._calls:
            _execute(call, slots)
        return self._results(slots)

    def _profile(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[float]]:
        slots, seconds = self._start(tensors), []
        for calls in self._steps:
            start = perf_counter()
            for call in calls:
                _execute(call, slots)
            seconds.append(perf_counter() - start)
        return self._results(slots), seconds

    def _results(self, slots: list[Any]) -> list[torch.Tensor]:
        """Hand over the outputs; copied where the tensor is not theirs alone."""
        return [
            viewed(slots[slot], access.desc).clone(memory_format=torch.preserve_format) if shared else slots[slot]
            for (slot, shared), (_, access) in zip(self._outputs, self.plan.outputs, strict=True)
        ]


def _execute(call: _Call, slots: list[Any]) -> None:
    results = call.function(*[slots[slot] for slot in call.reads])
    if len(call.writes) == 1:
        slots[call.writes[0]] = results
    else:
        for slot, result in zip(call.writes, results, strict=True):
            slots[slot] = result
    for slot in call.frees:
        slots[slot] = None


class _Program:
    """Buffers of a plan as slots, steps as calls; each view of a tensor has a slot too."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.slots: list[Any] = [None] * len(plan.buffers)
        for number, buffer in enumerate(plan.buffers):
            if buffer.home is Home.CONSTANT and buffer.index >= 0:
                self.slots[number] = plan.constants[buffer.index]
        self._formats = self._own_formats()
        #: (buffer, format) -> slot of the view; those of a buffer end with it
        self._views: dict[tuple[int, Any], int] = {}
        self.steps = [self._calls(number, step) for number, step in enumerate(plan.steps)]
        self.inputs = [buffer for _, _, buffer in plan.inputs]
        places = [access.buffer for _, access in plan.outputs]
        self.outputs = [
            (access.buffer, places.count(access.buffer) > 1 or not self._whole(access)) for _, access in plan.outputs
        ]

    def _own_formats(self) -> dict[int, Any]:
        """Return the format in which each buffer is made."""
        formats: dict[int, Any] = {buffer: desc for _, desc, buffer in self.plan.inputs if buffer >= 0}
        for step in self.plan.steps:
            for access in step.results:
                formats[access.buffer] = access.desc
        return formats

    def _whole(self, access: Access) -> bool:
        """Whether an access is the tensor that a step made, as it was made."""
        home = self.plan.buffers[access.buffer].home
        return home is Home.TENSOR and self._formats[access.buffer] == access.desc

    def _calls(self, number: int, step: Step) -> list[_Call]:
        calls: list[_Call] = []
        reads = tuple(self._slot(access, calls) for access in step.operands.values())
        writes = tuple(access.buffer for access in step.results)
        in_place = any(access.buffer == result.buffer for access in step.operands.values() for result in step.results)
        function = function_of(step.node, in_place=in_place)
        calls.append(_Call(function, reads, writes, self._ended(number)))
        return calls

    def _slot(self, access: Access, calls: list[_Call]) -> int:
        """Return the slot that holds an operand as it is read; a view is made when it is first needed."""
        buffer = self.plan.buffers[access.buffer]
        if buffer.home is Home.CONSTANT:
            tensor = viewed(self.slots[access.buffer], access.desc)
            if tensor is self.slots[access.buffer]:
                return access.buffer
            self.slots.append(tensor)
            return len(self.slots) - 1
        if self._formats.get(access.buffer) == access.desc:
            return access.buffer
        known = self._views.get((access.buffer, access.desc))
        if known is None:
            self.slots.append(None)
            known = self._views[access.buffer, access.desc] = len(self.slots) - 1
            desc = access.desc
            calls.append(_Call(lambda tensor: viewed(tensor, desc), (access.buffer,), (known,), ()))
        return known

    def _ended(self, number: int) -> tuple[int, ...]:
        """Return the slots that nobody reads after a step."""
        ended = {i for i, b in enumerate(self.plan.buffers) if b.home is Home.TENSOR and b.last == number}
        return (*ended, *(slot for (buffer, _), slot in self._views.items() if buffer in ended))
