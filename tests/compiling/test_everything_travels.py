"""What compiles can be saved, and gives equal bits after it was loaded; on another instruction set, right results."""

import warnings

import pytest
import torch

import fmtprop as fp
from benchmarks.sweep_modules import MODULES
from fmtprop import dnnl
from fmtprop.builtin import builtin_names
from fmtprop.errors import FmtpropError, PlanError
from fmtprop.layout import DataType
from fmtprop.planfile.container import Container, parts
from tests import processes
from tests.models import fuzz
from tests.models.fuzz_quantized import Drawn

#: how a random model is compiled, one after the other
OPTIONS = (
    {}, {"dtype": "bf16"}, {"policy": "propagate"}, {"target": "mkldnn"}, {"special_values": "exact"},
    {"weights": "int8"}, {"weights": "int4"}, {"policy": "naive"},
)  # fmt: skip


def check_travels(net, inputs):
    """Check that a model has the same steps and bits after it was loaded, and when it is saved again."""
    for again in (fp.load_plan(net.__reduce__()[1][0], on_mismatch="error"),) * 2:
        assert [(s.target, s.node.choice.impl, s.node.descs) for s in again.plan.steps] == [
            (s.target, s.node.choice.impl, s.node.descs) for s in net.plan.steps
        ]
        for got, expected in zip(again.run_flat(inputs), net.run_flat(inputs), strict=True):
            assert torch.equal(got.nan_to_num(), expected.nan_to_num())
        net = again


def check_random(seed, **kind):
    """Compile a random model in one of several ways, and check it; what is refused when compiled is of no interest."""
    program = fuzz.draw(seed, **kind)
    options = dict(OPTIONS[seed % len(OPTIONS)])
    if options.get("dtype") == "bf16" and not dnnl.supports(DataType.BF16):
        del options["dtype"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            net = fp.compile(fuzz.Model(program).eval(), tuple(program.inputs.values()), deterministic=True, **options)
        except FmtpropError:
            return
        check_travels(net, list(program.inputs.values()))


@pytest.mark.parametrize("seed", range(12))
def test_a_random_model(seed):
    check_random(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 1100, 50))
def test_a_thousand_random_models(first):
    for seed in range(first, first + 50):
        check_random(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 10))
def test_random_networks_of_real_sizes(first):
    for seed in range(first, first + 10):
        check_random(seed, blocks=True)


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(100), marks=pytest.mark.slow)])
def test_random_quantized_graphs(seeds):
    for seed in seeds:
        drawn = Drawn(seed)
        policy = ("propagate", "optimal")[seed % 2]
        net = fp.compile(drawn.graph, policy=policy, deterministic=True)
        if any("quantized_decomposed" in str(step.node.attrs) for step in net.plan.steps):
            with pytest.raises(PlanError, match=r"quantized_decomposed.* cannot be called from a file's graph"):
                check_travels(net, [drawn.x])
        else:
            check_travels(net, [drawn.x])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore")
def test_a_family_of_networks(name):
    make, shape = MODULES[name]
    torch.manual_seed(0)
    x = torch.randn(shape)
    check_travels(fp.compile(make().eval(), x), [x])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(builtin_names()))
def test_a_built_in_network(name):
    net = fp.compile(name, deterministic=True)
    check_travels(net, net.random_inputs())


def crafted(net, change):
    """Return a model's plan file with a changed document."""
    container = Container(memoryview(bytearray(net.__reduce__()[1][0])), None)
    change(container.document)
    return b"".join(parts(container.document, container.blocks))


@pytest.mark.skipif(dnnl.supports(DataType.F16), reason="this CPU computes in f16")
def test_a_plan_in_f16_is_one_error_where_the_cpu_lacks_it():
    """It says what the CPU lacks, as a compilation does."""

    def in_f16(document):
        document["options"]["dtype"] = "f16"
        document["environment"]["instruction set"] = "avx512_core_fp16"

    net = fp.compile(torch.nn.Linear(8, 4), torch.ones(2, 8), deterministic=True)
    with pytest.warns(RuntimeWarning, match="instruction set"), pytest.raises(FmtpropError, match="f16"):
        fp.load_plan(crafted(net, in_f16))


def test_a_step_of_training_is_no_plan():
    """Its module is: the message says what to save."""
    step = fp.compile(torch.nn.Linear(8, 4), torch.ones(2, 8), training=True)
    with pytest.raises(FmtpropError, match="state_dict"):
        step.save("x.fmtplan")


#: run with two instruction sets, one after the other: makes plans, or loads them and compares with the module
ELSEWHERE = """
import sys, warnings, torch, fmtprop as fp
from pathlib import Path
folder, kind, which = Path(sys.argv[1]), *sys.argv[2:]
torch.manual_seed(0)
module = torch.nn.Sequential(
    torch.nn.Conv2d(3, 32, 3, padding=1), torch.nn.BatchNorm2d(32), torch.nn.ReLU(), torch.nn.Conv2d(32, 32, 3),
    torch.nn.Flatten(), torch.nn.Linear(32 * 36, 64), torch.nn.GELU(), torch.nn.Linear(64, 10),
).eval()
x = torch.randn(2, 3, 8, 8)
options = {"int4": {"weights": "int4"}, "bf16": {"dtype": "bf16"}}.get(kind, {})
if kind == "dynamic":
    options = {"dynamic_shapes": ({0: torch.export.Dim("n", min=1, max=9)},)}
if kind == "int8":
    from tests.compiling.test_bytes import residual_network
    module, x = residual_network(), torch.randn(1, 3, 18, 18)
if which == "save":
    net = fp.compile(module, x, deterministic=True, **options)
    net.save(folder / "plan")
    torch.save(net(x), folder / "result")
else:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        got = fp.load_plan(folder / "plan")(x)
    expected, room = torch.load(folder / "result"), 0.05 if kind == "bf16" else 0.01
    assert (got - expected).abs().max() <= room * expected.abs().max(), (got - expected).abs().max()
    print([str(one.message) for one in told if "does not fit" in str(one.message)])
"""


@pytest.mark.skipif("avx512" not in str(dnnl.lib().isa), reason="needs two instruction sets")
@pytest.mark.parametrize("back", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind", ["f32", "int8", *(pytest.param(k, marks=pytest.mark.slow) for k in ("dynamic", "int4", "bf16"))]
)
def test_another_instruction_set(kind, back, tmp_path):
    """The plan is made again, with one warning."""
    for which, isa in zip(("save", "load"), ("AVX2", "ALL") if back else ("ALL", "AVX2"), strict=True):
        done = processes.run("-c", ELSEWHERE, tmp_path, kind, which, ONEDNN_MAX_CPU_ISA=isa)
        assert done.returncode == 0, done.stderr[-3000:]
    assert "instruction set: avx" in done.stdout
    assert "planned again" in done.stdout
