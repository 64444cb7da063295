"""Plan files that refer to the user's weights file: small, equal bits, and one error if that file is not the same."""

import json
import os
import pickle
import random
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fmtprop as fp
from fmtprop import dnnl
from fmtprop.errors import FmtpropError, PlanError
from fmtprop.planfile.container import Container, mapped, write
from tests.compiling.test_hostile_plans import edited, leaves


class Network(torch.nn.Module):
    """Folded normalizations, a transposed matrix, a table: numbers that are, and are not, as in the file."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Conv2d(3, 40, 3, padding=1), torch.nn.BatchNorm2d(40)
        self.second, self.last = torch.nn.Conv2d(40, 48, 3), torch.nn.Linear(48 * 36, 24)
        self.table = torch.nn.Parameter(torch.randn(24, 100))
        for tensor in (self.norm.running_mean, self.norm.running_var, self.norm.weight.data, self.norm.bias.data):
            tensor.uniform_(0.5, 1.5)

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        return torch.softmax(self.last(self.second(x).relu().flatten(1)) @ self.table, -1)


def made():
    torch.manual_seed(0)
    return Network().eval(), torch.randn(2, 3, 8, 8)


def as_safetensors(module, x, folder):
    save_file(module.state_dict(), folder / "net.safetensors")
    return "net.safetensors"


def as_state_dict(module, x, folder):
    torch.save(module.state_dict(), folder / "net.pt")
    return "net.pt"


def as_pt2(module, x, folder):
    torch.export.save(torch.export.export(module, (x,)), folder / "net.pt2")
    return "net.pt2"


def as_onnx(module, x, folder):
    fp.save(fp.from_torch(module, (x,)), folder / "net.onnx")
    return "net.onnx"


def as_external_data(module, x, folder):
    import onnx

    fp.save(fp.from_torch(module, (x,)), folder / "inside.onnx")
    onnx.save(onnx.load(folder / "inside.onnx"), folder / "net.onnx", save_as_external_data=True, location="net.data")
    os.remove(folder / "inside.onnx")
    return "net.onnx"


FILES = [as_safetensors, as_state_dict, as_pt2, as_onnx, as_external_data]


@pytest.mark.parametrize("write_file", FILES)
def test_a_plan_refers_to_a_file_of_any_kind(write_file, tmp_path):
    module, x = made()
    name = write_file(module, x, tmp_path)
    net = fp.compile(module, x, deterministic=True, winograd=False)
    net.save(tmp_path / "whole.fmtplan")
    net.save(tmp_path / "net.fmtplan", weights=tmp_path / name)
    again = fp.load_plan(tmp_path / "net.fmtplan", on_mismatch="error")
    assert torch.equal(again(x), net(x))
    assert torch.equal(pickle.loads(pickle.dumps(again))(x), net(x))  # a pickle has all
    whole, small = ((tmp_path / f"{one}.fmtplan").stat().st_size for one in ("whole", "net"))
    least = 4 * (40 * 48 * 9 + 48 * 36 * 24)  # the largest tensors
    assert small <= whole - least
    elsewhere = tmp_path / "plans"
    elsewhere.mkdir()
    (tmp_path / "net.fmtplan").rename(elsewhere / "net.fmtplan")
    refers_to = "net.data" if write_file is as_external_data else name
    for weights in (tmp_path, tmp_path / refers_to, [str(tmp_path / refers_to)]):
        assert torch.equal(fp.load_plan(elsewhere / "net.fmtplan", "error", weights=weights)(x), net(x))


@pytest.mark.parametrize("options", [{"dtype": "bf16"}, {"weights": "int8"}, {"target": "mkldnn"}])
def test_numbers_of_other_types(options, tmp_path):
    """Converted numbers are made again; codes are in the plan file, and only the rest is not."""
    if options.get("dtype") == "bf16" and not dnnl.supports("bf16"):
        pytest.skip("oneDNN has no bf16 on this CPU")
    module, x = made()
    name = as_safetensors(module, x, tmp_path)
    net = fp.compile(module, x, deterministic=True, **options)
    net.save(tmp_path / "net.fmtplan", weights=tmp_path / name)
    assert torch.equal(fp.load_plan(tmp_path / "net.fmtplan", on_mismatch="error")(x), net(x))


def test_a_model_for_several_shapes(tmp_path):
    """Its program's tensors are in the weights file, too."""
    module, x = made()
    name = as_safetensors(module, x, tmp_path)
    net = fp.compile(module, x, dynamic_shapes=({0: torch.export.Dim("n", min=1, max=9)},), deterministic=True)
    net(x)
    net.save(tmp_path / "whole.fmtplan")
    net.save(tmp_path / "net.fmtplan", weights=tmp_path / name)
    assert (tmp_path / "net.fmtplan").stat().st_size < (tmp_path / "whole.fmtplan").stat().st_size / 2
    again, other = fp.load_plan(tmp_path / "net.fmtplan", on_mismatch="error"), torch.randn(5, 3, 8, 8)
    assert torch.equal(again(x), net(x))
    torch.testing.assert_close(again(other), module(other))


def test_several_files(tmp_path):
    """Parts of a model, in the order that was given."""
    module, x = made()
    state = module.state_dict()
    parts = [tmp_path / f"{number}.safetensors" for number in (1, 2)]
    for part, keys in zip(parts, (list(state)[:7], list(state)[7:]), strict=True):
        save_file({key: state[key] for key in keys}, part)
    net = fp.compile(module, x, deterministic=True)
    net.save(tmp_path / "net.fmtplan", weights=parts)
    assert torch.equal(fp.load_plan(tmp_path / "net.fmtplan", "error", weights=parts)(x), net(x))
    with pytest.raises(PlanError, match=r"are in 2 files \(1.safetensors, 2.safetensors\), weights= names 1: give"):
        fp.load_plan(tmp_path / "net.fmtplan", weights=parts[0])
    with pytest.raises(PlanError, match=r"bytes, but .*2.safetensors has"):
        fp.load_plan(tmp_path / "net.fmtplan", weights=parts[::-1])


@pytest.fixture
def saved(tmp_path):
    """A plan that refers to a file beside it."""
    module, x = made()
    name = as_safetensors(module, x, tmp_path)
    net = fp.compile(module, x, deterministic=True)
    net.save(tmp_path / "net.fmtplan", weights=tmp_path / name)
    return tmp_path / "net.fmtplan", tmp_path / name, net(x), x


def test_a_plan_that_does_not_fit_is_planned_again_from_the_other_file(saved):
    plan, _, expected, x = saved
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        with pytest.warns(RuntimeWarning, match="does not fit: threads"):
            torch.testing.assert_close(fp.load_plan(plan)(x), expected)
    finally:
        torch.set_num_threads(before)


def changed(weights):
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)


def longer(weights):
    weights.write_bytes(weights.read_bytes() + b"\0")


def linked(weights):
    weights.rename(weights.with_name("other"))
    weights.symlink_to(weights.with_name("other"))


def a_folder(weights):
    weights.unlink()
    weights.mkdir()


def a_fifo(weights):
    weights.unlink()
    os.mkfifo(weights)


DAMAGE = [
    (Path.unlink, r"there is no .*net.safetensors: put that file there, or say where it is: fp.load_plan\(\.\.\., wei"),
    (changed, r"but .*net.safetensors has \w{64}, so it is another file, or was changed: bring that file back, or co"),
    (longer, r"of \d+ bytes, but .*net.safetensors has \d+: bring that file back"),
    (linked, r"cannot be read: it is a link, not a file; put that file there, or say where it is"),
    (a_folder, "cannot be read: it is a directory, not a file"),
    (a_fifo, "cannot be read: it is a fifo, not a file"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_another_weights_file_is_one_error(damage, message, saved):
    """Which names the plan, the weights file, its digest, and the remedy."""
    plan, weights, *_ = saved
    damage(weights)
    head = r"^plan file .*net.fmtplan: its weights are in 'net.safetensors' with the SHA-256 \w{64}"
    with pytest.raises(PlanError, match=head) as caught:
        fp.load_plan(plan)
    assert caught.match(message)


def test_a_link_that_the_caller_names_is_followed(saved):
    plan, weights, expected, x = saved
    linked(weights)
    assert torch.equal(fp.load_plan(plan, weights=weights)(x), expected)


def test_bytes_need_the_callers_path(saved):
    plan, weights, expected, x = saved
    with pytest.raises(PlanError, match=r"say where it is: fp.load_plan\(\.\.\., weights=PATH\)"):
        fp.load_plan(plan.read_bytes())
    assert torch.equal(fp.load_plan(plan.read_bytes(), weights=weights)(x), expected)


def test_a_plan_with_its_weights_takes_no_file(saved):
    _, weights, *_ = saved
    net = fp.compile(torch.nn.Linear(8, 4), torch.ones(2, 8))
    net.save(weights.with_name("small.fmtplan"))
    with pytest.raises(PlanError, match="has its weights inside: leave out weights="):
        fp.load_plan(weights.with_name("small.fmtplan"), weights=weights)
    with pytest.raises(PlanError, match=r"none of the model's weights of 4096 bytes or more are in .*net.safetensors"):
        net.save(weights.with_name("small.fmtplan"), weights=weights)


def test_files_that_have_no_weights(tmp_path):
    net = fp.compile(torch.nn.Linear(8, 4), torch.ones(2, 8))
    plan = tmp_path / "net.fmtplan"
    for name, data in [("a", b""), ("b", b"PK\3\4nothing"), ("c", b"\xff" * 8 + b"{"), ("d", b"\0" * 8 + b"{}")]:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(PlanError, match=r"is no .safetensors, .onnx, .pt2 or .pt file|none of the model's weights"):
            net.save(plan, weights=tmp_path / name)
    for bad, message in [(tmp_path / "none", "No such file"), (5, "a path must be"), (tmp_path, "a directory")]:
        with pytest.raises(PlanError, match=f"^weights file .*: cannot be read: .*{message}"):
            net.save(plan, weights=bad)
    with pytest.raises(PlanError, match="weights= names no file"):
        net.save(plan, weights=[])
    assert not plan.exists()


NAMES = ["../net.safetensors", "/etc/passwd", "a/net.safetensors", "", ".", "..", "a\0b", "C:net", "x" * 300, None, 5]


def rewritten(plan, change):
    """Write the file again with a document that was changed by somebody hostile."""
    container = Container(*mapped(plan))
    blocks = [block.clone() for block in container.blocks]
    write(plan, change(json.loads(json.dumps(container.document))), blocks)


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_names_no_path(name, saved):
    """Not even one that leads to the right file."""
    plan, *_ = saved

    def renamed(document):
        document["weights"]["files"][0][0] = name
        return document

    rewritten(plan, renamed)
    with pytest.raises(PlanError, match=r"its weights file .* must be (the name of a file, without a path|a name, a)"):
        fp.load_plan(plan)


def test_a_few_bytes_do_not_ask_for_all_memory(saved):
    """One range again and again, in formats with much padding."""
    plan, *_ = saved

    def repeated(document):
        rows = document["weights"]["blocks"]
        count = len(document["checksums"])
        rows += [[count + i, *rows[0][1:]] for i in range(100_000)]
        document["checksums"] += [0] * 100_000
        return document

    container = Container(*mapped(plan))
    blocks = [block.clone() for block in container.blocks] + [torch.empty(0, dtype=torch.uint8)] * 100_000
    write(plan, repeated(json.loads(json.dumps(container.document))), blocks)
    with pytest.raises(PlanError, match="all of them are much larger than the files"):
        fp.load_plan(plan)


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(1000), marks=pytest.mark.slow)])
def test_edited_references_are_refused_or_right(seeds, saved):
    plan, _, expected, x = saved
    container = Container(memoryview(bytearray(plan.read_bytes())), None)
    paths = [path for path in leaves(container.document) if path[:1] == ("weights",)]
    for seed in seeds:
        write(plan, edited(container.document, random.Random(seed), paths), container.blocks)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                assert torch.equal(fp.load_plan(plan)(x), expected), f"seed {seed}"
            except FmtpropError as error:
                assert len(str(error)) < 2000
