"""Search for any executable choice, or the reason why there is none.

Owns the last resort of the solver: a program without costs, in which every rule may be broken at a price. Its solution
shows which rules conflict.
"""

from __future__ import annotations

import math

from fmtprop.errors import PassError
from fmtprop.passes.optimal.conversions import ReorderTable
from fmtprop.passes.optimal.problem import Format, Problem, Tensor, find_cycle
from fmtprop.passes.optimal.program import Demand, LinearProgram, demand, supply


def find_feasible(problem: Problem, table: ReorderTable) -> tuple[int, ...]:
    """Find an executable choice, without regard to cost or time."""
    program = LinearProgram()
    for _ in problem.alternatives:
        program.variable(0.0, integral=True)
    undone = {}
    for op, indices in problem.covering().items():
        # At a higher price than a tensor: if both explain the conflict, the tensor explains it better.
        undone[op] = program.variable(2.0, integral=True)
        program.row(1.0, 1.0, (1.0, [*indices, undone[op]]))
    missing = {}
    supplies = supply(problem)
    for tensor, demands in demand(problem).items():
        missing[tensor] = program.variable(1.0, integral=True)
        for fmt in dict.fromkeys(fmt for demanded in demands for fmt in demanded):
            sources = _sources(supplies.get(tensor, {}), fmt, tensor, table)
            for demanded in demands:
                if fmt in demanded:
                    program.row(0.0, math.inf, (1.0, [*sources, missing[tensor]]), (-1.0, demanded[fmt]))
    while True:
        values = program.minimise(typical=1e5).values
        if values is None:
            raise PassError("optimal: HiGHS cannot tell whether the assignment problem has a solution; check the costs")
        tensors = [tensor for tensor, variable in missing.items() if values[variable] > 0.5]
        ops = [op for op, variable in undone.items() if values[variable] > 0.5]
        if tensors or ops:
            raise PassError(_explain(problem, tensors, ops))
        chosen = tuple(index for index in range(len(problem.alternatives)) if values[index] > 0.5)
        cycle = find_cycle(problem, chosen)
        if not cycle:
            return chosen
        program.row(-math.inf, len(cycle) - 1.0, (1.0, cycle))


def _sources(supplied: Demand, fmt: Format, tensor: Tensor, table: ReorderTable) -> list[int]:
    """Return the writers of formats from which chains of reorders lead to a format."""
    return [
        index for src, indices in supplied.items() if table[tensor].distance(src, fmt) < math.inf for index in indices
    ]


def _explain(problem: Problem, tensors: list[Tensor], ops: list[str]) -> str:
    if tensors:
        tensor = tensors[0]
        written, read = supply(problem).get(tensor, {}), demand(problem)[tensor]
        wanted = dict.fromkeys(fmt for demanded in read for fmt in demanded)
        writers = _ops(problem, [index for indices in written.values() for index in indices])
        readers = _ops(problem, [index for demanded in read for indices in demanded.values() for index in indices])
        return (
            f"optimal: {tensor} cannot get from {writers} to {readers}: it can be written in {_list(written)} and is "
            f"read in {_list(wanted)}, but no reorders lead to all that must be read at once; remove a pin, or add an "
            "alternative or a reorder"
        )
    return (
        f"optimal: {ops[0]} cannot be executed together with the rest: its alternatives "
        f"({_ops(problem, problem.covering()[ops[0]], ', ')}) execute another op twice or wait for each other; add an "
        "alternative that covers it alone"
    )


def _ops(problem: Problem, indices: list[int], separator: str = " or ") -> str:
    return separator.join(dict.fromkeys("+".join(problem.alternatives[index].covers) for index in indices))


def _list(formats: dict[Format, list[int]] | dict[Format, None]) -> str:
    return ", ".join(str(fmt) for fmt in formats)
