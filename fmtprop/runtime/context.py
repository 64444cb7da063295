"""An execution context: an arena, memory objects over it, and the prebuilt calls of every step.

A context serves one run at a time; concurrent runs of a plan use one each and share the constants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache
from itertools import chain, groupby
from math import inf
from time import perf_counter, thread_time

import torch

from fmtprop import dnnl
from fmtprop.errors import PlanError
from fmtprop.ir import Node, result_names
from fmtprop.jit import Call, CallList, flushed, no_code
from fmtprop.layout import MemoryDesc
from fmtprop.runtime.arenas import Arena
from fmtprop.runtime.boundary import Endpoint, write_out
from fmtprop.runtime.direct import Run, generated, read_tensors, reads_whole
from fmtprop.runtime.output import Output
from fmtprop.runtime.plan import Access, Buffer, Home, Plan, Step, Turn
from fmtprop.targets.bound import (
    NOTHING,
    SCRATCHPAD,
    Bound,
    Making,
    MovableMemory,
    OwnStream,
    Place,
    PythonCalls,
    as_planned,
)
from fmtprop.targets.memory import HUGE_PAGE_NBYTES, view

#: buffers with another tensor in each run
_PASSING = (Home.INPUT, Home.OUTPUT, Home.TENSOR)


class Context:
    """Calls of one run, in an arena; who runs it has the arena's lock.

    `flushes`: whether denormal numbers are zero in native steps.
    """

    def __init__(self, plan: Plan, arena: Arena, *, flushes: bool = True) -> None:
        self.plan, self.arena, self.lock = plan, arena, arena.lock
        self.is_open = True
        self._flushes = flushes
        self._stream = OwnStream()
        # a step may write a part of the caller's tensor, or write it with another shape
        formats = {access.buffer: access.desc for step in plan.steps for access in step.results}
        formats |= {buffer: desc for _, desc, buffer in plan.inputs}
        formats |= {a.buffer: a.desc for _, a in plan.outputs if plan.buffers[a.buffer].home is Home.OUTPUT}
        self._memories = [self._memory(buffer, formats.get(number)) for number, buffer in enumerate(plan.buffers)]
        #: step -> memory of tensors that it is the last to read
        self._last: dict[int, list[MovableMemory]] = {}
        for memory, buffer in zip(self._memories, plan.buffers, strict=True):
            if buffer.home is Home.TENSOR:
                self._last.setdefault(buffer.last, []).append(memory)
        #: those with another tensor in each run: the caller's tensors, and tensors that steps make
        self._passing = [
            memory for memory, buffer in zip(self._memories, plan.buffers, strict=True) if buffer.home in _PASSING
        ]
        #: of these, the ones that the backward half of a plan reads or writes
        self._kept = {self._memories[i] for i in _of_backward(plan) if plan.buffers[i].home in _PASSING}
        #: the calls of each step
        self._bounds = [self._bound(step, index) for index, step in enumerate(plan.steps)]
        #: consecutive native calls
        self._lists: list[CallList] = []
        turn = plan.turn.step if plan.turn is not None else len(self._bounds)
        bounds = list(enumerate(self._bounds))
        #: the calls of each half; of a plan with one entry point, the second one has none
        self._halves = self._joined(bounds[:turn]), self._joined(bounds[turn:])
        #: those that calls have views of
        self._viewed = [memory for memory in self._passing if memory.is_viewed]
        self._has_python = not all(bound.is_native for bound in self._bounds)
        self._is_asynchronous = self._stream.is_asynchronous
        self._inputs = [self._memories[buffer] if buffer >= 0 else None for _, _, buffer in plan.inputs]
        self._outputs = [self._output(number, *output) for number, output in enumerate(plan.outputs)]
        #: all of a run without tensors for the results, made at the first one
        self._direct: Run | None = None
        self.clear()

    def run(self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Execute every step."""
        if out is None:
            if self._direct is None:
                self._direct = self._generated()
            return self._direct(self, inputs)
        return self.planned(inputs, out)

    def planned(self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Execute every step as :meth:`run` does, in any mode of the caller."""
        self._bind(self._inputs, inputs, self._outputs, out)
        self._execute(*self._halves)
        results = self._results(self._outputs, out)
        self.clear()
        return results

    def forward(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Execute the forward half, and keep the tensors that the backward half will read.

        `inputs`: inputs of the forward half, checked, in the plan's formats. If the backward half reads one of them, it
        must not be changed until then.
        """
        turn = self._turn()
        outputs = self._outputs[: turn.output]
        self._bind(self._inputs[: turn.input], inputs, outputs)
        self._execute(self._halves[0])
        results = self._results(outputs)
        given = (output.place.memory for output in outputs if output.is_written or output.is_made)
        bound = [*self._inputs[: turn.input], *given]
        for memory in bound:
            if memory is not None and memory in self._kept:
                # the caller's tensor will have a gradient function, which keeps this context alive
                memory.put(memory.tensor.detach())
            elif memory is not None:
                memory.clear()
        return results

    def backward(
        self, tangents: Sequence[torch.Tensor], *, again: bool = False, arena: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Execute the backward half.

        `arena`: the arena, under another owner, whose memory results may take. This context must not run as long as
        they exist. Default: results have memory of their own.
        """
        turn = self._turn()
        before = self.arena.memory.clone() if again else None
        made = [(memory, memory.tensor) for memory in self._kept] if again else ()
        outputs = self._outputs[turn.output :]
        self._bind(self._inputs[turn.input :], tangents, outputs)
        if arena is not None:
            for output, (_, access) in zip(outputs, self.plan.outputs[turn.output :], strict=True):
                if access.buffer in self.plan.inside:
                    output.memory.put(view(arena, access.desc, self.plan.inside[access.buffer]))
        self._execute(self._halves[1])
        results = self._results(outputs)
        if arena is not None:
            self.clear()
        if before is not None:
            self.arena.memory.copy_(before)
        for memory, tensor in made:
            if tensor is NOTHING:  # a gradient, which only this half makes
                memory.clear()
            else:
                memory.put(tensor)
        return results

    def rest(self) -> None:
        """Give the pages of the arena back; the next run takes new ones."""
        dnnl.drop_pages(self.arena.memory.data_ptr(), self.arena.memory.numel())

    def shrink(self) -> None:
        """Give the pages of the arena back that no gradient in it needs, for good."""
        start, end = self.arena.memory.data_ptr(), 0
        taken = sorted((offset, offset + self.plan.buffers[i].nbytes) for i, offset in self.plan.inside.items())
        for first, stop in (*taken, (self.plan.arena_nbytes, 0)):
            begin = -(-end // HUGE_PAGE_NBYTES) * HUGE_PAGE_NBYTES
            nbytes = first // HUGE_PAGE_NBYTES * HUGE_PAGE_NBYTES - begin
            if nbytes > 0:
                dnnl.drop_pages(start + begin, nbytes)
            end = max(end, stop)

    def profile(
        self, inputs: Sequence[torch.Tensor], limit: float = inf, see: Callable[[Step, Place], None] | None = None
    ) -> tuple[list[torch.Tensor], list[tuple[float, float]]]:
        """Execute like :meth:`run`, step by step; return the results, and when each step began and its seconds.

        After the limit, in seconds, no step begins, and there are no results. With one thread, seconds are those of its
        work: other programs that have the processor in between do not count.

        `see`: called after each step with the place of its first result.
        """
        now = thread_time if self.plan.threads == 1 else perf_counter
        self._bind(self._inputs, inputs, self._outputs)
        spans: list[tuple[float, float]] = []
        end = perf_counter() + limit
        with as_planned():
            for step, bound in zip(self.plan.steps, self._bounds, strict=True):
                start = perf_counter()
                if start > end:
                    self.clear()
                    return [], spans
                before = now()
                with flushed() if self._flushes and bound.is_native else nullcontext():
                    for call in bound.calls:
                        function, a, b, c, d = call
                        status = function(a, b, c, d)
                        self._stream.wait()
                        if status:
                            self.fail(call, status)
                spans.append((start, now() - before))
                if see is not None and step.results:
                    see(step, self._place(step.results[0]))
        results = self._results(self._outputs)
        self.clear()
        return results, spans

    def clear(self) -> None:
        """Let go of the tensors that were bound for a run, or for both halves of one."""
        for memory in self._passing:
            memory.tensor = NOTHING  # as its clear() does
        for memory in self._viewed:
            memory.clear()

    def close(self) -> None:
        """Release the native objects; it runs no more."""
        self.is_open = False
        for bound in self._bounds:
            bound.close()
        for calls in self._halves:
            calls.clear()
        self._lists.clear()
        self._bounds.clear()
        self._stream.close()

    # ------------------------------------------------------------------ a run

    def _turn(self) -> Turn:
        if self.plan.turn is None:
            raise PlanError(f"model {self.plan.name} has no backward half: compile it with training=True")
        return self.plan.turn

    def _execute(self, *halves: Sequence[Call]) -> None:
        if self._has_python:
            with as_planned():
                self._make(halves)
        else:
            self._make(halves)
        if self._is_asynchronous:
            self._stream.wait()

    def _make(self, halves: Sequence[Sequence[Call]]) -> None:
        for calls in halves:
            for call in calls:
                function, a, b, c, d = call
                status = function(a, b, c, d)
                if status:
                    self.fail(call, status)

    def _bind(
        self,
        memories: Sequence[MovableMemory | None],
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[Output],
        out: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Point the external memories at this run's tensors."""
        for index, memory in enumerate(memories):
            if memory is not None:
                memory.put(inputs[index])
        if out is None:
            for output in outputs:
                if output.is_written:
                    output.memory.put(output.new())
            return
        for output, tensor in zip(outputs, out, strict=True):
            if output.is_written:
                output.memory.put(tensor if output.takes(tensor) else output.new())

    def _results(self, outputs: Sequence[Output], out: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        results = []
        for index, output in enumerate(outputs):
            result = output.memory.tensor if output.is_written else output.place.tensor()
            if out is not None:
                given = out[index]
                if result is not given:
                    write_out(given, result)
                result = given
            elif not (output.is_written or output.is_made):
                result = output.copied()
            results.append(result)
        return results

    def fail(self, call: Call, status: int) -> None:
        """Raise the error of a call with this status."""
        # a list stops at the call that failed
        reached = next((found for calls in self._lists if calls.call is call and (found := calls.reached)), call)
        bound = next(bound for bound in self._bounds if any(one is reached for one in bound.calls))
        raise bound.failure(status)

    # ------------------------------------------------------------------ building

    def _generated(self) -> Run:
        """Return a function that does the same as a run without tensors for the results."""
        if self._is_asynchronous:
            return Context.planned
        return generated(self._inputs, self._outputs, chain(*self._halves), self._read_elsewhere())

    def _read_elsewhere(self) -> set[MovableMemory]:
        """Return the memories of the caller's tensors that a Python call reads in another way than by its arguments."""
        found = {output.memory for output in self._outputs if not (output.is_written or reads_whole(output))}
        for step, bound in zip(self.plan.steps, self._bounds, strict=True):
            named = {tensor for _, call in bound.pairs for tensor in read_tensors(call)}
            results = () if any(isinstance(call, Making) for _, call in bound.pairs) else step.results
            for access in (*step.operands.values(), *results) if bound.pairs else ():
                memory = self._memories[access.buffer]
                if id(memory.whole_view) not in named or memory.desc != access.desc:
                    found.add(memory)
        return found

    def _output(self, number: int, name: str, access: Access) -> Output:
        place, buffer = self._place(access), self.plan.buffers[access.buffer]
        alone = sum(other.buffer == access.buffer for _, other in self.plan.outputs) == 1
        # it may be a view, of all numbers
        whole = place.is_whole or (access.desc.is_packed and access.desc.nbytes == buffer.nbytes)
        is_made = (buffer.home is Home.TENSOR and whole and alone) or number in self.plan.changed
        return Output(Endpoint(name, access.desc), place, buffer.home is Home.OUTPUT, is_made)

    def _bound(self, step: Step, index: int) -> Bound:
        places = {name: self._place(access) for name, access in step.operands.items()}
        for name, access in zip(result_names(step.node), step.results, strict=True):
            places[name] = self._place(access, is_read=self.plan.buffers[access.buffer].last > index)
        if step.scratchpad is not None:
            nbytes = self.plan.buffers[step.scratchpad].nbytes
            places[SCRATCHPAD] = self._place(Access(step.scratchpad, _bytes(nbytes)))
        return step.executable.bind(step.node, places, self._stream)

    def _place(self, access: Access, *, is_read: bool = True) -> Place:
        return Place(self._memories[access.buffer], access.desc, is_read=is_read)

    def _memory(self, buffer: Buffer, desc: MemoryDesc | None) -> MovableMemory:
        if buffer.home is Home.ARENA:
            return MovableMemory(self.arena.memory[buffer.offset : buffer.offset + buffer.nbytes])
        if buffer.home is Home.CONSTANT and buffer.index >= 0:
            return MovableMemory(self.plan.constants[buffer.index])
        return MovableMemory(desc=desc if buffer.home in _PASSING else None)

    def _drops(self, index: int) -> Iterator[tuple[Node, Callable[[], object]]]:
        """Yield functions that drop the tensors that steps made and that no later step reads."""
        for memory in self._last.get(index, ()):
            yield self.plan.steps[index].node, memory.clear

    def _joined(self, numbered: Iterable[tuple[int, Bound]]) -> list[Call]:
        """Return the calls of some steps; consecutive native calls become one list.

        The next Python calls drop the tensors that native calls are the last to read.
        """
        joined: list[Call] = []
        late: list[tuple[Node, Callable[[], object]]] = []
        for is_native, some in groupby(numbered, key=lambda one: one[1].is_native):
            bounds = list(some)
            calls = [call for _, bound in bounds for call in bound.calls]
            if not is_native:
                pairs = [pair for index, bound in bounds for pair in (*bound.pairs, *self._drops(index))]
                joined.append((PythonCalls([*late, *pairs]), None, None, None, None))
                late = []
                continue
            late += [pair for index, _ in bounds for pair in self._drops(index)]
            if no_code():
                joined += calls
            else:
                self._lists.append(CallList(calls, flushes=self._flushes))
                joined.append(self._lists[-1].call)
        return joined


@lru_cache(maxsize=1024)  # scratchpads of a few sizes are many
def _bytes(count: int) -> MemoryDesc:
    return MemoryDesc((count,), "u8")


def _of_backward(plan: Plan) -> set[int]:
    """Return the buffers that the backward half of a plan reads or writes."""
    if plan.turn is None:
        return set()
    steps = plan.steps[plan.turn.step :]
    found = {access.buffer for step in steps for access in (*step.operands.values(), *step.results)}
    return found | {access.buffer for _, access in plan.outputs[plan.turn.output :]}
