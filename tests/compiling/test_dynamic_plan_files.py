"""Plan files of models for several shapes: their plans travel, and new shapes are planned where they are loaded."""

import copy
import pickle
import subprocess
import sys
import warnings
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.export import Dim

import fmtprop as fp
from fmtprop.errors import InputError, PlanError
from fmtprop.planfile.container import Container, mapped, write


class Pair(NamedTuple):
    """Two results, of which one is a size."""

    scores: torch.Tensor
    rows: int


class Net(nn.Module):
    """Weights that are packed as they are, folded, tied and transposed; nested arguments and results."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(24, 32)
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 32, bias=False)
        self.tied = nn.Linear(32, 32, bias=False)
        self.tied.weight = self.head.weight
        self.register_buffer("scale", torch.rand(32), persistent=False)

    def forward(self, x, masks, *, factor=2.0):
        y = self.norm(self.first(x)).relu() * self.scale
        y = self.tied(self.head(y)) * masks["a"]
        return {"pair": Pair(y, x.shape[0]), "rest": [y @ self.head.weight.t() * factor]}


def compiled(**options):
    module = Net().eval()
    batch = Dim("batch", max=64)
    args = torch.randn(4, 24), {"a": torch.rand(4, 1)}
    net = fp.compile(module, args, dynamic_shapes={"x": {0: batch}, "masks": {"a": {0: batch}}}, **options)
    return module, net


def call(rows):
    torch.manual_seed(rows)
    return torch.randn(rows, 24), {"a": torch.rand(rows, 1)}


def equal(one, other):
    return all(
        torch.equal(a, b) for a, b in ((one["pair"].scores, other["pair"].scores), (one["rest"][0], other["rest"][0]))
    )


def check_right(net, module, rows):
    got, expected = net(*call(rows)), module(*call(rows))
    torch.testing.assert_close(got["pair"].scores, expected["pair"].scores, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got["rest"][0], expected["rest"][0], rtol=1e-4, atol=1e-5)
    assert got["pair"].rows == rows


def test_plans_of_several_shapes_travel(tmp_path):
    """Equal bits for the shapes in the file, right results for others, the same refusals."""
    module, net = compiled(tune="model", max_shapes=3)
    for rows in (4, 7, 16):
        net(*call(rows))
    net.save(tmp_path / "net.fmtplan")
    again = fp.load_plan(tmp_path / "net.fmtplan", on_mismatch="error")
    assert isinstance(again, fp.DynamicModel)
    assert again.shapes == net.shapes
    assert again.max_shapes == 3
    for rows in (4, 7, 16):
        assert equal(again(*call(rows)), net(*call(rows)))
    check_right(again, module, 9)
    assert len(again.shapes) == 3
    assert again.plan_for(*call(9)).compilation.is_like_another_shape
    with pytest.raises(InputError, match=r"x axis 0: got 65, but the model was exported for 0 to 64"):
        again(*call(65))
    again.save(tmp_path / "again.fmtplan")
    third = fp.load_plan(tmp_path / "again.fmtplan", on_mismatch="error")
    assert equal(third(*call(9)), again(*call(9)))
    check_right(third, module, 11)


def test_weights_are_in_the_file_once(tmp_path):
    """However many shapes read them; new shapes in the loading process share them, too."""
    module = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).eval()
    net = fp.compile(module, torch.randn(32, 512), dynamic_shapes=({0: Dim("n", max=64)},), tune="model")
    for rows in (33, 34, 35):
        net(torch.randn(rows, 512))
    net.save(tmp_path / "net.fmtplan")
    assert (tmp_path / "net.fmtplan").stat().st_size < 1.3 * 2 * 4 * 512 * 512
    again = fp.load_plan(tmp_path / "net.fmtplan")
    x = torch.randn(36, 512)
    torch.testing.assert_close(again(x), module(x), rtol=1e-4, atol=1e-5)
    constants = [
        {flat.data_ptr() for flat in one.plan.constants if flat.numel() > 4096} for one in again._plans.values()
    ]
    assert constants[0] == constants[-1]
    assert len(constants[0]) == 2


def test_pickle_and_copies(tmp_path):
    module, net = compiled(tune="model")
    net(*call(7))
    for again in (pickle.loads(pickle.dumps(net)), copy.deepcopy(net), copy.copy(net)):
        assert again.shapes == net.shapes
        assert equal(again(*call(7)), net(*call(7)))
        check_right(again, module, 5)


def test_a_branch_that_sizes_decide_is_remembered(tmp_path):
    class Parity(nn.Module):
        def forward(self, x):
            return x * 2 if x.shape[0] % 2 == 0 else x * 3

    net = fp.compile(Parity(), torch.ones(4, 5), dynamic_shapes=({0: Dim.AUTO},))
    again = pickle.loads(pickle.dumps(net))
    assert torch.equal(again(torch.ones(6, 5)), torch.full((6, 5), 2.0))
    with pytest.raises(InputError, match=r"got 3: the model takes another branch there than .*Mod\("):
        again(torch.ones(3, 5))


def test_buckets(tmp_path):
    module = nn.Linear(8, 4)
    options = {"dynamic_shapes": ({0: Dim("n", max=64)},), "buckets": {"input": {0: (8, 16)}}}
    net = fp.compile(module, torch.randn(5, 8), tune="model", **options)
    net.save(tmp_path / "net.fmtplan")
    again = fp.load_plan(tmp_path / "net.fmtplan")
    for rows in (8, 5, 13, 20):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(again(x), module(x))
    assert again.shapes == [((8, 8),), ((16, 8),), ((20, 8),)]


def test_another_version_plans_every_shape_again(tmp_path):
    module, net = compiled(tune="model")
    net(*call(7))
    net.save(tmp_path / "net.fmtplan")
    container = Container(*mapped(tmp_path / "net.fmtplan"))
    container.document["environment"]["fmtprop"] = "0.0.1"
    write(tmp_path / "old.fmtplan", container.document, container.blocks)
    with pytest.raises(PlanError, match=r"does not fit: fmtprop: 0\.0\.1 in the file"):
        fp.load_plan(tmp_path / "old.fmtplan", on_mismatch="error")
    with pytest.warns(
        RuntimeWarning, match=r"does not fit: fmtprop: 0\.0\.1 in the file, .*; it is planned again"
    ) as told:
        again = fp.load_plan(tmp_path / "old.fmtplan")
    assert len(told) == 1
    assert again.shapes == net.shapes
    for rows in (4, 7, 9):
        check_right(again, module, rows)


FRESH = """
import sys, torch, fmtprop as fp
net = fp.load_plan(sys.argv[1], on_mismatch="error")
before = "sympy" in sys.modules
print(net(torch.ones(4, 5)).sum().item(), before, net(torch.ones(6, 5)).sum().item())
"""


def test_a_fresh_process_imports_the_exporter_for_a_new_shape_only(tmp_path):
    net = fp.compile(nn.ReLU(), torch.ones(4, 5), dynamic_shapes=({0: Dim("n")},))
    net.save(tmp_path / "net.fmtplan")
    command = [sys.executable, "-W", "error", "-c", FRESH, str(tmp_path / "net.fmtplan")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["20.0", "False", "30.0"]


def test_a_program_that_cannot_be_written_is_refused(tmp_path):
    """With the reason and the remedy."""

    class Parity(nn.Module):
        def forward(self, x):
            return x * 2 if x.shape[0] % 2 == 0 else x * 3

    exported = torch.export.export(Parity(), (torch.ones(4, 5),), dynamic_shapes=({0: Dim.AUTO},))
    torch.export.save(exported, tmp_path / "m.pt2")
    net = fp.compile(torch.export.load(tmp_path / "m.pt2"))
    with pytest.raises(PlanError, match=r"Parity cannot be saved with .*: it was read from a file, and has"):
        net.save(tmp_path / "net.fmtplan")
    net.plan_for(torch.ones(4, 5)).save(tmp_path / "one.fmtplan")
    assert torch.equal(fp.load_plan(tmp_path / "one.fmtplan")(torch.ones(4, 5)), torch.full((4, 5), 2.0))


def test_a_hostile_program_is_refused(tmp_path):
    """Its text goes through the checks of a .pt2 file before PyTorch reads it."""
    net = fp.compile(nn.ReLU(), torch.ones(4, 5), dynamic_shapes=({0: Dim("n")},))
    net.save(tmp_path / "net.fmtplan")
    container = Container(*mapped(tmp_path / "net.fmtplan"))
    document = container.document
    document["program"]["relations"] = ["__import__('os').system('true')"]
    write(tmp_path / "net.fmtplan", document, container.blocks)
    again = fp.load_plan(tmp_path / "net.fmtplan")
    assert again(torch.ones(4, 5)).shape == (4, 5)
    with warnings.catch_warnings(), pytest.raises(fp.FmtpropError, match="is not part of a size"):
        again(torch.ones(5, 5))
