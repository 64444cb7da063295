"""Plan files: the same model in another process, with the same implementations and equal bits."""

import copy
import io
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import fmtprop as fp
from fmtprop import dnnl
from fmtprop.errors import PlanError, UnsupportedOpError
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.store import Store
from fmtprop.tuning.paces import Paces
from tests import processes
from tests.compiling.test_bytes import residual_network


class Pair(NamedTuple):
    """Two results."""

    low: torch.Tensor
    high: torch.Tensor


class Nested(torch.nn.Module):
    """Arguments and results in dictionaries and a named tuple."""

    def forward(self, x, masks, *, scale=2.0):
        return {"pair": Pair(x.relu() * scale, x.sigmoid() + masks["a"]), "rest": [masks["b"].sum(1)]}


class Lookup(torch.nn.Module):
    """Operators that only PyTorch has, with indices among the constants."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(11, 8)
        self.register_buffer("order", torch.tensor([3, 1, 0, 2]))

    def forward(self, tokens):
        return torch.cumsum(self.table(tokens)[:, self.order], 1).sort(-1)


def convolutions():
    """Convolutions with batch norms, a residual sum, a concat, and a pooling."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Conv2d(3, 17, 3, padding=1)
            self.norm = torch.nn.BatchNorm2d(17)
            self.second = torch.nn.Conv2d(17, 17, 3, padding=1)
            self.third = torch.nn.Conv2d(34, 8, 1)

        def forward(self, x):
            x = self.norm(self.first(x)).relu()
            x = torch.cat((x, self.second(x) + x), 1)
            return torch.nn.functional.max_pool2d(self.third(x), 2).flatten(1)

    torch.manual_seed(0)
    return Net(), (torch.randn(2, 3, 16, 16),)


MODELS = {
    "convolutions": convolutions,
    "linear": lambda: (torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.GELU()), (torch.randn(4, 24),)),
    "lstm": lambda: (torch.nn.LSTM(16, 32, 2), (torch.randn(5, 3, 16),)),
    "gru": lambda: (torch.nn.GRU(16, 32), (torch.randn(5, 3, 16),)),
    "attention": lambda: (torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), (torch.randn(2, 7, 32),)),
    "lookup": lambda: (Lookup(), (torch.randint(0, 11, (3, 4)),)),
    "transposed": lambda: (torch.nn.ConvTranspose2d(6, 10, 3, stride=2), (torch.randn(1, 6, 9, 9),)),
    "grouped": lambda: (torch.nn.Conv2d(8, 16, 3, groups=4), (torch.randn(1, 8, 9, 9),)),
    "constant": lambda: (Constant(), (torch.randn(3),)),
}


class Constant(torch.nn.Module):
    """A result that depends on no input."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(3.0))

    def forward(self, x):
        return x + self.weight.exp(), self.weight * 2


def choices(net):
    """Return what decides the numbers of each step."""
    return [(step.node.name, step.target, step.node.choice.impl, step.node.descs) for step in net.plan.steps]


def check_same(net, again, inputs):
    """Check that a loaded model is the saved one."""
    assert choices(again) == choices(net)
    assert again.plan.buffers == net.plan.buffers
    for got, expected in zip(again.run_flat(inputs), net.run_flat(inputs), strict=True):
        assert torch.equal(got, expected)


def saved(net, tmp_path, name="model.fmtplan"):
    """Return the path of a model's plan file."""
    net.save(tmp_path / name)
    return tmp_path / name


@pytest.mark.parametrize(
    ("name", "target"), [*((one, "onednn") for one in MODELS), *((one, "mkldnn") for one in [*MODELS][::3])]
)
def test_a_loaded_plan_is_the_saved_one(name, target, tmp_path):
    """Implementations, buffers and bits."""
    module, args = MODELS[name]()
    net = fp.compile(module.eval(), args, target=target, tune="model", confirm=False)
    path = saved(net, tmp_path)
    again = fp.load_plan(path, on_mismatch="error")
    check_same(net, again, list(args))
    again.save(tmp_path / "again.fmtplan")
    check_same(net, fp.load_plan(tmp_path / "again.fmtplan", on_mismatch="error"), list(args))


@pytest.mark.skipif(not dnnl.supports(DataType.BF16), reason="this CPU has no bf16")
def test_bf16(tmp_path):
    """Packed weights of another type than the module's."""
    module, args = convolutions()
    net = fp.compile(module.eval(), args, "bf16", tune="model", confirm=False)
    again = fp.load_plan(saved(net, tmp_path), on_mismatch="error")
    check_same(net, again, args)
    assert again.precision == "bf16"


@pytest.mark.parametrize("policy", ["propagate", "optimal"])
@pytest.mark.parametrize("kind", ["linear", "conv", "deconv"])
def test_strides_without_effect(kind, policy, tmp_path):
    """An axis of size 1: asked for any format, oneDNN gives strides of its own, by which its kernel sums up."""
    torch.manual_seed(0)
    module, x = {
        "linear": (torch.nn.Linear(24, 1, bias=False), torch.randn(4, 24)),
        "conv": (torch.nn.Conv1d(3, 3, 1), torch.randn(2, 3, 1)),
        "deconv": (torch.nn.ConvTranspose1d(3, 3, 1), torch.randn(2, 3, 5)),
    }[kind]
    net = fp.compile(module, x, policy=policy, deterministic=True)
    again = fp.load_plan(saved(net, tmp_path), on_mismatch="error")
    check_same(net, again, [x])
    both = [[dict(step.node.choice.handle.identity) for step in one.plan.steps] for one in (net, again)]
    assert both[0] == both[1]


def test_options_and_structures(tmp_path):
    """Pins, formats at the boundary, exact special values; nested arguments and results."""
    x = torch.randn(2, 16, 8, 8)
    boundary = {"output_1": MemoryDesc((2, 16, 8, 8), tag="acdb")}
    module = torch.nn.Conv2d(16, 16, 3, padding=1)
    net = fp.compile(module, (x,), boundary=boundary, special_values="exact", verify="off", tune="model")
    again = fp.load_plan(saved(net, tmp_path), on_mismatch="error")
    check_same(net, again, [x])
    assert again.options == net.options
    assert again.certificate == net.certificate
    args, kwargs = (torch.randn(2, 3), {"a": torch.ones(3), "b": torch.ones(2, 3)}), {"scale": 2.0}
    net = fp.compile(Nested(), args, kwargs=kwargs, tune="model")
    result = fp.load_plan(saved(net, tmp_path), on_mismatch="error")(*args, **kwargs)
    expected = net(*args, **kwargs)
    assert isinstance(result["pair"], Pair)
    assert torch.equal(result["pair"].high, expected["pair"].high)
    assert torch.equal(result["rest"][0], expected["rest"][0])


def test_a_loaded_plan_reports_and_runs_with_other_threads(tmp_path):
    """What a model can do besides running."""
    module, args = convolutions()
    net = fp.compile(module.eval(), args, tune="model", confirm=False)
    again = fp.load_plan(saved(net, tmp_path), on_mismatch="error")
    report, expected = again.report(repeats=1), net.report(repeats=1)
    assert [row.impl for row in report.steps] == [row.impl for row in expected.steps]
    assert [row.name for row in report.packing] == [row.name for row in expected.packing]
    assert again.prepare(torch.get_num_threads() + 1).threads == torch.get_num_threads() + 1
    again.compilation.with_constants()
    with again.throughput(2) as pool:
        for result in pool.map([args[0]] * 3):
            torch.testing.assert_close(result, net(*args))


def test_pickle_copy_and_torch_save(tmp_path):
    """All carry the bytes of a plan file."""
    module, args = convolutions()
    net = fp.compile(module.eval(), args, tune="model", confirm=False)
    for protocol in (2, pickle.HIGHEST_PROTOCOL):
        check_same(net, pickle.loads(pickle.dumps(net, protocol)), args)
    buffers = []
    data = pickle.dumps(net, 5, buffer_callback=buffers.append)
    assert len(data) < 1000
    check_same(net, pickle.loads(data, buffers=buffers), args)
    file = io.BytesIO()
    torch.save({"net": net}, file)
    file.seek(0)
    check_same(net, torch.load(file, weights_only=False)["net"], args)
    check_same(net, copy.deepcopy(net), args)
    assert copy.deepcopy(net).plan is net.plan


SPAWNED = """
import sys, torch, fmtprop as fp
net = fp.load_plan(sys.argv[1], on_mismatch="error")
result = net(torch.load(sys.argv[2]))
print(result.view(torch.int32).sum().item(), sorted(m for m in ("networkx", "scipy", "sympy") if m in sys.modules))
"""


def words():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 8))
    return module, (torch.randint(0, 50, (2, 7)),)


class Masked(torch.nn.Module):
    """Tokens with places that are counted, a mask, looked-up distances, and a mean of all but the first token."""

    def __init__(self):
        super().__init__()
        self.words, self.places, self.distances = (torch.nn.Embedding(50, 16) for _ in range(3))
        self.inner = torch.nn.Linear(16, 16)

    def forward(self, ids):
        mask = ids.ne(1)
        count = torch.cumsum(mask.to(dtype=torch.int32, device=ids.device), 1).type_as(mask.int()) * mask.int()
        x = self.inner(self.words(ids) + self.places(count.long() + 1))
        rows, columns = torch.arange(len(ids))[:, None, None], torch.arange(ids.shape[1])[None, None, :]
        seen = ids.to(dtype=torch.bool, device=ids.device)[rows, columns] & mask[:, :, None]
        scores = torch.where(seen, x @ x.mT, -1e9) + torch.gather(x @ x.mT, -1, (ids[:, None, :] % 7).expand(-1, 7, 7))
        return (scores.softmax(-1) @ x)[:, 1:].mean(1)


def masked():
    torch.manual_seed(0)
    return Masked(), (torch.randint(0, 50, (1, 7)),)


@pytest.mark.parametrize("made", [convolutions, words, masked])
def test_another_process_gives_equal_bits_and_imports_little(made, tmp_path):
    """Neither networkx nor a solver, nor sympy, which PyTorch imports to find the shapes of many results."""
    module, args = made()
    net = fp.compile(module.eval(), args, tune="model", confirm=False)
    path, numbers = saved(net, tmp_path), tmp_path / "input.pt"
    torch.save(args[0], numbers)
    command = [sys.executable, "-W", "error", "-c", SPAWNED, str(path), str(numbers)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = net(*args)
    assert done.stdout.split() == [str(result.view(torch.int32).sum().item()), "[]"]


class OfTokens(torch.nn.Module):
    """A depthwise convolution of all tokens but the first, added to them."""

    def __init__(self):
        super().__init__()
        self.positions = torch.nn.Conv2d(32, 32, 3, padding=1, groups=32)

    def forward(self, x):
        x = x * 2
        first, image = x[:, :1], x[:, 1:].transpose(1, 2).reshape(len(x), 32, 4, 4)
        return torch.cat([first, (self.positions(image) + image).flatten(2).transpose(1, 2)], 1)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_what_reads_a_slice_is_offered_again(dtype, tmp_path):
    if dtype == "bf16" and not dnnl.supports("bf16"):
        pytest.skip("this CPU has no bf16")
    x = torch.randn(1, 17, 32)
    net = fp.compile(OfTokens().eval(), (x,), dtype=dtype, tune="model", confirm=False)
    check_same(net, fp.load_plan(saved(net, tmp_path), on_mismatch="error"), (x,))


def test_weights_are_in_the_file_once(tmp_path):
    """A packed form is shared by all its readers."""
    layer = torch.nn.Linear(512, 512)
    net = fp.compile(torch.nn.Sequential(layer, torch.nn.ReLU(), layer), torch.randn(8, 512), tune="model")
    assert saved(net, tmp_path).stat().st_size < 1.5 * 4 * 512 * 512


def test_an_older_file_is_planned_again():
    """A file of the first version, as it was written when plan files were new."""
    file = Path(__file__).parent / "data" / "version_1.fmtplan"
    torch.manual_seed(0)
    convolution, norm = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8)
    tail = torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Flatten(), torch.nn.Linear(8 * 16, 4)
    module, x = torch.nn.Sequential(convolution, norm, *tail).eval(), torch.randn(2, 3, 8, 8)
    with pytest.warns(RuntimeWarning, match="plan file: version 1 in the file, version 3 here.*planned again"):
        torch.testing.assert_close(fp.load_plan(file)(x), module(x))
    with pytest.raises(PlanError, match="does not fit: plan file: version 1 in the file, version 3 here"):
        fp.load_plan(file, on_mismatch="error")


def test_a_plan_for_other_threads_is_made_again(tmp_path):
    """With one warning that says what differs; or an error."""
    module, args = convolutions()
    net = fp.compile(module.eval(), args, tune="model", confirm=False)
    path = saved(net, tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        with pytest.raises(PlanError, match=f"does not fit: threads: {before} in the file, {before + 1} here; load"):
            fp.load_plan(path, on_mismatch="error")
        with pytest.warns(RuntimeWarning, match="planned again from the graph inside") as caught:
            again = fp.load_plan(path)
        assert len(caught) == 1
        torch.testing.assert_close(again(*args), net(*args))
        assert again.plan.threads == before + 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_inside_is_the_model(name, tmp_path):
    """A plan of another version is planned again, with the same results up to rounding."""
    module, args = MODELS[name]()
    net = fp.compile(module.eval(), args, tune="model", confirm=False)
    path = saved(net, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = fp.load_plan(other_version(path))
    for got, expected in zip(again.run_flat(list(args)), net.run_flat(list(args)), strict=True):
        torch.testing.assert_close(got, expected)


QUANTIZED = {
    "residual": residual_network,
    "signed": lambda: residual_network(signed=True),
    "int8 codes": lambda: lowered(weights="int8"),
    "int4 codes": lambda: lowered(weights="int4"),
    "mkldnn": lambda: lowered(target="mkldnn"),
    **({"bf16": lambda: lowered(dtype="bf16")} if dnnl.supports(DataType.BF16) else {}),
}


def lowered(**options):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 128)).eval()
    return fp.compile(module, torch.randn(4, 256), deterministic=True, **options)


@pytest.mark.parametrize("name", QUANTIZED)
def test_other_numbers_than_f32_are_planned_again(name, tmp_path):
    """Bytes of a grid are real numbers in the graph inside; codes stay codes."""
    made = QUANTIZED[name]()
    net = made if isinstance(made, fp.CompiledModel) else fp.compile(made, deterministic=True)
    inputs, path = net.random_inputs(), saved(net, tmp_path)
    check_same(net, fp.load_plan(path, on_mismatch="error"), inputs)
    with pytest.warns(RuntimeWarning, match=r"does not fit: fmtprop: 0\.0\.1 in the file"):
        again = fp.load_plan(other_version(path))
    assert again.precision == net.precision
    for got, expected in zip(again.run_flat(inputs), net.run_flat(inputs), strict=True):
        torch.testing.assert_close(got, expected)


ELSEWHERE = """
import sys, torch, fmtprop as fp
torch.set_num_threads(int(sys.argv[2]))
torch.manual_seed(0)
layers = torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 1)
fp.compile(torch.nn.Sequential(*layers).eval(), torch.ones(1, 3, 16, 16), deterministic=True).save(sys.argv[1])
"""


def test_a_plan_of_another_instruction_set(tmp_path):
    """One warning that names both; the same results."""
    here = dnnl.lib().isa
    path = tmp_path / "elsewhere.fmtplan"
    isa = "AVX2" if here != "avx2" else "SSE41"
    assert processes.run("-c", ELSEWHERE, path, torch.get_num_threads(), ONEDNN_MAX_CPU_ISA=isa).returncode == 0
    with pytest.raises(PlanError, match=r"does not fit: instruction set: \S+.* in the file, .* here; load it with"):
        fp.load_plan(path, on_mismatch="error")
    with pytest.warns(RuntimeWarning, match="does not fit: instruction set: ") as told:
        again = fp.load_plan(path)
    assert len(told) == 1
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 1)
    x = torch.ones(1, 3, 16, 16)
    torch.testing.assert_close(again(x), torch.nn.Sequential(*layers)(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("key", ["torch", "oneDNN", "CPU caches"])
def test_what_differs_is_named(key, tmp_path):
    net = fp.compile(torch.nn.Linear(8, 4), torch.randn(2, 8), deterministic=True)
    path = other_version(saved(net, tmp_path), key)
    with pytest.raises(PlanError, match=rf"does not fit: {key}: 0\.0\.1 in the file, .* here; load it with"):
        fp.load_plan(path, on_mismatch="error")


def other_version(path, key="fmtprop"):
    """Return a plan file that another version of this program, or another machine, made."""
    from fmtprop.planfile.container import Container, mapped, write

    container = Container(*mapped(path))
    container.document["environment"][key] = "0.0.1"
    write(path.with_name("other.fmtplan"), container.document, container.blocks)
    return path.with_name("other.fmtplan")


def test_errors(tmp_path):
    """Each is one line that names the file."""
    with pytest.raises(UnsupportedOpError, match="on_mismatch must be 'replan' or 'error', got 'never'"):
        fp.load_plan(tmp_path / "x", on_mismatch="never")
    with pytest.raises(PlanError, match=r"plan file .*missing: cannot be read: No such file"):
        fp.load_plan(tmp_path / "missing")
    with pytest.raises(PlanError, match=r"cannot be read: it is a directory"):
        fp.load_plan(tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(PlanError, match="is empty; a plan file comes from"):
        fp.load_plan(tmp_path / "empty")
    (tmp_path / "text").write_text("hello, this is no plan")
    with pytest.raises(PlanError, match="is not a plan file"):
        fp.load_plan(tmp_path / "text")
    with pytest.raises(PlanError, match="is not a plan file"):
        fp.load_plan(b"x")
    net = fp.compile(torch.nn.ReLU(), torch.ones(2))
    with pytest.raises(PlanError, match="cannot be written: there is another file of that name"):
        net.save(tmp_path / "text")
    path = saved(net, tmp_path)
    data = path.read_bytes()
    with pytest.raises(PlanError, match="has version '9', this fmtprop reads versions 1 to 3: it needs a newer fmt"):
        fp.load_plan(data.replace(b'"version":"3"', b'"version":"9"', 1))
    with pytest.raises(PlanError, match="is cut off or damaged"):
        fp.load_plan(data[:-64])


def test_a_report_of_a_file_has_the_paces_of_its_certificate(tmp_path, own_cache):
    """What other models' runs teach in between may make another plan cheaper."""
    Paces(Store()).learn([(("modelled", "f32", "convolution", "other"), 1e-4, 3e-4)])
    net = fp.compile(torch.nn.Conv2d(8, 16, 3), torch.randn(1, 8, 9, 9), tune="model", confirm=False)
    Paces(Store()).learn([(("modelled", "f32", "convolution", "other"), 1e-4, 9e-4)])
    loaded = fp.load_plan(saved(net, tmp_path))
    assert loaded.certificate == net.certificate is not None
    assert dict(map(_pair, loaded.basis.paces.records())) == dict(map(_pair, net.basis.paces.records())) != {}


def _pair(record):
    family, pace = record
    return tuple(family), pytest.approx(pace)


def test_deterministic_plans_are_the_same_with_any_records(tmp_path, monkeypatch):
    """Neither measured peaks nor recorded figures nor races decide."""
    module, args = convolutions()
    module = module.eval()
    first = fp.compile(module, args, deterministic=True)
    monkeypatch.setenv("FMTPROP_CACHE_DIR", str(tmp_path))
    assert not list(tmp_path.iterdir())
    second = fp.compile(module, args, deterministic=True)
    check_same(first, second, args)
    assert first.race is None
    assert [node.choice.cost for node in first.graph] == [node.choice.cost for node in second.graph]
    fp.compile(module, args, tune="measure")
    check_same(first, fp.compile(module, args, deterministic=True), args)
    with pytest.raises(UnsupportedOpError, match="leave out tune='measure'"):
        fp.compile(module, args, deterministic=True, tune="measure")
