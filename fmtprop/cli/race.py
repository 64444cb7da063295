"""``fmtprop bench``: a model raced against other runtimes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated

import typer

from fmtprop.cli.arguments import (
    Dtype,
    Inputs,
    Json,
    Model,
    Policy,
    Shapes,
    SpecialValues,
    TableFile,
    Target,
    Threads,
    Train,
    Tune,
    Weights,
    no_weights_in_training,
    words,
)
from fmtprop.cli.console import USAGE, emit, failing, finish, progress
from fmtprop.cli.named import graph_of, module_maker, original_of
from fmtprop.cli.plan import check_no_options, is_plan
from fmtprop.system.limits import MAX_RUNS


def bench(
    model: Model,
    versus: Annotated[
        list[str] | None,
        typer.Option(
            "--vs",
            metavar="NAME[,NAME...]",
            help="torch, torch-bf16, torch-f16, torch-channels-last, inductor, inductor-bf16, inductor-f16, "
            "onnxruntime, openvino, openvino-bf16, openvino-f16, or fmtprop with another policy, tune or dtype "
            "(fmtprop-plain). Speed-ups are relative to the first. ONNX Runtime and OpenVINO come with "
            "pip install 'fmtprop[bench]'.",
            show_default="torch",
        ),
    ] = None,
    policy: Policy = "optimal",
    dtype: Dtype = "f32",
    weights: Weights = None,
    tune: Tune = "auto",
    target: Target = "onednn",
    special_values: SpecialValues = None,
    threads: Threads = None,
    rounds: Annotated[
        int, typer.Option("--rounds", "-n", min=1, max=MAX_RUNS, help="Turns of every runtime, interleaved.")
    ] = 20,
    shape: Shapes = None,
    inputs: Inputs = None,
    train: Train = False,
    report: TableFile = None,
    as_json: Json = False,
) -> None:
    """Race a model against other runtimes.

    All get the same weights, the same input and the same threads, and take turns in random order. Outputs are compared
    with PyTorch's first; a runtime that disagrees is not timed, and the exit code is 1.
    With --train, whole steps (gradients to zero, forward, loss, backward, SGD with momentum) against torch,
    torch-channels-last and inductor, without dropout; loss and gradients are compared first.
    """
    with progress() as say:
        from fmtprop.api import Options
        from fmtprop.bench.contenders import against, race
        from fmtprop.compiling.loading import read_plan
        from fmtprop.compiling.options import KEPT
        from fmtprop.compiling.stages import with_codes
        from fmtprop.report.files import TABLES, check_destination

        with failing(USAGE):
            if report is not None:
                check_destination(report, TABLES)
            special = special_values or (KEPT if train else Options.special_values)
            options = Options(dtype=dtype, policy=policy, target=target, tune=tune, special_values=special)
            if is_plan(model):
                given = dict(dtype=dtype, weights=weights, tune=tune, target=target, special_values=special_values)
                check_no_options(model, given, policy=policy != "optimal", train=train, shape=shape, input=inputs)
                file = read_plan(model)
                options = file.options
            contenders = against(words(versus or ["torch"]), options)
            if is_plan(model):
                contenders[0] = replace(contenders[0], plan=model)
                run = partial(race, file.plans[0].inside())
            elif not train:
                graph = graph_of(model, inputs, shape)
                # with weights in codes, all compute with the same numbers, which the module does not have
                module = original_of(graph, model, inputs) if weights is None else None
                run = partial(race, with_codes(graph, weights), module=module)
            else:
                from fmtprop.bench.training import check_contenders, race_steps  # imports torch._dynamo: 1.5 s

                no_weights_in_training(weights)
                make = module_maker(model, inputs, shape)
                check_contenders(contenders)
                run = partial(race_steps, make, dtype=dtype)
        result = run(contenders, reference=contenders[1].name, threads=threads, rounds=rounds, progress=say)
    emit(result.to_json() if as_json else result.to_text())
    finish(result, report)
