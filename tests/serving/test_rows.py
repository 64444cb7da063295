"""Any number of rows by the plans there are, and the rule that rows are independent."""

import dataclasses

import pytest
import torch

import fmtprop as fp
from fmtprop import dnnl
from fmtprop.errors import InputError
from fmtprop.serving import Engine, Rows, Spec


def table(seconds, dims=(3,), log=None):
    """Engines that double, one for each number of rows, with a cost each."""

    def engine(rows, cost):
        def run(tensors):
            assert tensors[0].shape == (rows, *dims)
            if log is not None:
                log.append(rows)
            return [tensors[0] * 2]

        spec = Spec("x", torch.float32, (rows, *dims))
        return Engine((spec,), (dataclasses.replace(spec, name="y"),), run, cost)

    return [engine(rows, cost) for rows, cost in seconds.items()]


@pytest.mark.parametrize(
    ("seconds", "count", "runs"),
    [
        ({8: 1.0}, 0, []),
        ({8: 1.0}, 3, [8]),
        ({8: 1.0}, 17, [8, 8, 8]),
        ({1: 1.0, 8: 2.0}, 17, [8, 8, 1]),  # a run of eight costs two of one
        ({1: 1.0, 8: 2.0}, 3, [8]),
        ({1: 1.0, 4: 3.0, 8: 9.0}, 9, [4, 4, 1]),  # eight at once are not worth it
        ({2: 0.0, 8: 1.0}, 10, [8, 2]),  # nothing is known of one, so costs are by rows
        ({1: 1.0, 4: 4.0}, 8, [4, 4]),  # of equal costs the fewest runs
    ],
)
def test_rows_run_where_they_cost_least(seconds, count, runs):
    log = []
    rows = Rows(table(seconds, log=log))
    log.clear()
    x = torch.arange(count * 3.0).reshape(count, 3)
    (y,) = rows.run([x])
    assert torch.equal(y, 2 * x)
    assert log == runs


def test_plans_for_several_sizes_of_rows():
    rows = Rows([*table({4: 1.0}), *table({2: 1.0, 4: 1.5}, dims=(5,))])
    assert rows.inputs == (Spec("x", torch.float32, (-1, -1)),)
    assert torch.equal(rows.run([torch.ones(3, 5)])[0], torch.full((3, 5), 2.0))
    assert rows.most(((5,),)) == 4
    with pytest.raises(InputError, match="no plan for each row of x of 4: it has plans for 3 or 5"):
        rows.run([torch.ones(1, 4)])
    with pytest.raises(InputError, match=r"input x is torch.float64, model model takes torch.float32"):
        rows.run([torch.ones(1, 5, dtype=torch.float64)])
    with pytest.raises(InputError, match=r"input x has 1 axes, model model takes 2: \[-1, -1\]"):
        rows.run([torch.ones(5)])
    with pytest.raises(InputError, match="has 1 inputs, got 2"):
        rows.run([torch.ones(1, 5)] * 2)


class Mean(torch.nn.Module):
    """Each row minus the mean of all."""

    def forward(self, x):
        return x - x.mean(0)


class Running(torch.nn.Module):
    """The first row depends on no other."""

    def forward(self, x):
        return x.cumsum(0)


@pytest.mark.parametrize("module", [Mean(), Running(), torch.nn.Softmax(0), torch.nn.Flatten(0)])
def test_rows_that_depend_on_each_other_never_run_together(module):
    net = fp.compile(module, torch.ones(4, 3), deterministic=True)
    rows = Rows(net)
    assert not rows.batched
    x = torch.randn(4, 3)
    torch.testing.assert_close(rows.run([x])[0], module(x))
    with pytest.raises(InputError, match=r"has no plan for \w+ of 3x3: it has plans for 4x3"):
        rows.run([x[:3]])


NEEDS_BF16 = pytest.mark.skipif(not dnnl.supports("bf16"), reason="oneDNN has no bf16 on this CPU")


@pytest.mark.parametrize("dtype", ["f32", pytest.param("bf16", marks=NEEDS_BF16)])
def test_a_convolution_is_independent(dtype, tmp_path):
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 4))
    for count in (1, 4):
        net = fp.compile(module, torch.ones(count, 3, 8, 8), dtype=dtype, deterministic=True)
        net.save(tmp_path / f"{count}.fmtplan")
    rows = Rows(tmp_path, "small")
    assert rows.batched and rows.name == "small"
    x = torch.randn(7, 3, 8, 8)
    torch.testing.assert_close(rows.run([x])[0], module(x).detach(), rtol=0.05, atol=0.05 if dtype == "bf16" else 1e-4)


def test_a_model_for_several_shapes_gives_its_plans(tmp_path):
    module = torch.nn.Linear(8, 4)
    batch = torch.export.Dim("batch", min=1, max=16)
    net = fp.compile(module, torch.ones(4, 8), dynamic_shapes=({0: batch},), deterministic=True)
    net.warm_up([torch.ones(2, 8)])
    net.save(tmp_path / "a.fmtplan")
    x = torch.randn(7, 8)
    for source in (net, tmp_path / "a.fmtplan"):
        torch.testing.assert_close(Rows(source).run([x])[0], module(x).detach())


def test_an_error_names_the_row():
    rows = Rows(fp.compile(torch.nn.Embedding(5, 2), torch.zeros(4, 3, dtype=torch.int64), deterministic=True))
    index = torch.zeros(7, 3, dtype=torch.int64)
    index[5, 1] = 9
    with pytest.raises(InputError, match=r"^row 5: "):
        rows.run([index])
    assert rows.run([index[:5]])[0].shape == (5, 3, 2)


def test_plans_of_two_models_are_refused(tmp_path):
    other = dataclasses.replace(table({2: 1.0})[0], inputs=(Spec("z", torch.float32, (2, 3)),))
    with pytest.raises(InputError, match="not of one model"):
        Rows([*table({1: 1.0}), other])
    with pytest.raises(InputError, match="has no plan"):
        Rows([])
    with pytest.raises(InputError, match=r"has no file \*.fmtplan"):
        Rows(tmp_path)
