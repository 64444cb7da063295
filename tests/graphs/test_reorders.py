"""What `propagate` costs, counted on the graph files with the instruction set pinned: machines differ.

The counts are exact, so that a change of a pass that costs a reorder is seen. Most are the one between oneDNN's first
convolution, which writes blocks of channels, and the next one, which reads channels last.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from fmtprop import dnnl
from graphs.architectures import ARCHITECTURES

ROOT = Path(__file__).parents[2]

#: activation reorders per run, by graph; by what AVX2 and AVX-512 give
REORDERS = {
    "chain": 1,  # pooling to the row-major output
    "residual": 2,
    "concat": 3,
    "resnet50": 1,
    "vgg16": 2,  # and before the classifier, whose weights are stored for row-major features
    "inception_v3": 1,
    "mobilenet_v2": 1,
    "shufflenet_v2": 14,
    "densenet121": 4,
    "efficientnet_b0": 1,
    "convnext_t": 1,
    "bert_base": 48,  # four in each of 12 layers: queries, keys and values by head, and the heads side by side again
    "vit_b16": 49,
    "unet": 1,
    "conv3d": 1,
}

#: oneDNN 3.6.2's first convolution reads channels last: the reorder is before it
REORDERS_3_6 = {**REORDERS, "chain": 2, "concat": 2, "vgg16": 1, "densenet121": 1}

ISAS = {"AVX2": "avx2", "AVX512_CORE": "avx512_core"}

#: one process for those that a default run asks about, another for the rest
QUICK = ("chain", "residual", "concat", "resnet50", "vgg16", "inception_v3", "mobilenet_v2", "shufflenet_v2")
SLOW = tuple(name for name in ARCHITECTURES if name not in QUICK)

#: planned too, so that what a run executes is counted, not only the graph's nodes
PLANNED = ("chain", "residual", "concat", "mobilenet_v2", "shufflenet_v2", *SLOW)

graphs = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in REORDERS]
)
isas = pytest.mark.parametrize("isa", ISAS)


def run(*command: str, **environment: str) -> str:
    """Run Python in a process of its own, with two threads: oneDNN's choices depend on their number."""
    env = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return done.stdout


@lru_cache
def pinned(isa: str, policy: str, names: tuple[str, ...]) -> dict[str, Any]:
    answer = json.loads(run("-m", "tests.graphs.pinned", policy, *names, ONEDNN_MAX_CPU_ISA=isa))
    assert answer["isa"] == ISAS[isa]
    return answer["graphs"]


def facts(isa: str, name: str, policy: str = "propagate") -> dict[str, Any]:
    if not has(isa):
        pytest.skip(f"oneDNN has no {ISAS[isa]} on this CPU, only {dnnl.lib().isa}")
    group = QUICK if name in QUICK else SLOW
    return pinned(isa, policy, tuple(f"+{n}" if n in PLANNED else n for n in group))[name]


def has(isa: str) -> bool:
    mine = dnnl.lib().isa
    return mine.startswith("avx512_core") or (isa == "AVX2" and mine.startswith("avx2"))


def test_every_graph_is_counted() -> None:
    assert set(REORDERS) == set(ARCHITECTURES)


@graphs
@isas
def test_activation_reorders(isa: str, name: str) -> None:
    found = facts(isa, name)["reorders"]
    expected = REORDERS if dnnl.lib().version < (3, 3) else REORDERS_3_6
    assert len(found) == expected[name], "\n".join(found)


@graphs
@isas
def test_everything_runs_on_onednn(isa: str, name: str) -> None:
    # an embedding looks rows up by number, which oneDNN has no primitive for
    assert facts(isa, name)["fallback"] == (["node aten_1 (aten)"] if name == "bert_base" else [])


@graphs
@isas
def test_no_reference_loop_where_there_is_another_implementation(isa: str, name: str) -> None:
    assert {label: impls for label, impls in facts(isa, name)["ref"].items() if impls} == {}


@graphs
@isas
def test_kernels_are_those_of_the_instruction_set(isa: str, name: str) -> None:
    assert any(impl.endswith(ISAS[isa]) for impl in facts(isa, name)["impls"])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in PLANNED]
)
@isas
def test_no_weight_is_reordered_after_compile(isa: str, name: str) -> None:
    known = facts(isa, name)
    assert known["steps_of_constants"] == []
    assert known["plan_reorders"] == len(known["reorders"])
    assert known["packed"] > 0


@pytest.mark.parametrize("policy", ["plain", pytest.param("naive", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["concat", "mobilenet_v2"])
def test_the_other_policies_frame_it(policy: str, name: str) -> None:
    """`plain` reorders nothing and pays in kernels; `naive` pays at every convolution."""
    if not has("AVX2"):
        pytest.skip(f"oneDNN has no avx2 on this CPU, only {dnnl.lib().isa}")
    found = pinned("AVX2", policy, ("concat", "mobilenet_v2"))[name]
    assert {label: impls for label, impls in found["ref"].items() if impls} == {}
    if policy == "plain":
        assert found["reorders"] == []
    else:
        assert len(found["reorders"]) > REORDERS[name]


# ---------------------------------------------------------------- what oneDNN says

EXECUTED = """
import sys
import fmtprop as fp

net = fp.compile(sys.argv[1], policy=sys.argv[2], verify="off")
x = net.random_inputs()
net.run_flat(x)
print("-- run", flush=True)
net.run_flat(x)
print("-- done", flush=True)
print(len(net.plan.reorders), sum(step.target == "onednn" for step in net.plan.steps))
"""


@pytest.mark.parametrize(
    ("name", "policy"),
    [("concat", "propagate"), pytest.param("resnet50", "propagate", marks=pytest.mark.slow)],
)
def test_onednn_executes_the_reorders_of_the_plan_and_no_others(name: str, policy: str) -> None:
    before, _, rest = run("-c", EXECUTED, name, policy, ONEDNN_VERBOSE="1").partition("-- run\n")
    during, _, after = rest.partition("-- done\n")
    executed = [primitive for line in during.splitlines() if (primitive := primitive_of(line))]
    reorders, steps = map(int, after.split())
    assert len(executed) == steps
    assert executed.count("reorder") == reorders > 0
    assert "reorder" in map(primitive_of, before.splitlines())  # weights were packed, once


def primitive_of(line: str) -> str:
    """Return the primitive that a line of oneDNN's log says was executed, such as ``reorder``; else nothing."""
    fields = line.split(",")
    if not fields[0].startswith("onednn_verbose") or "exec" not in fields:
        return ""
    # …,exec,cpu,reorder,…; later versions write …,primitive,exec,cpu,reorder,…
    return fields[fields.index("exec") + 2]
