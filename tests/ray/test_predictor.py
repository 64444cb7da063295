"""Columns of batches through a plan, without Ray and with it."""

import os

import numpy as np
import pytest
import torch

import fmtprop as fp
from fmtprop.errors import InputError
from fmtprop.ray import Predictor


class Two(torch.nn.Module):
    """Two inputs, two results."""

    def forward(self, image, token):
        return image.flatten(1).sum(1, keepdim=True), token * 2


@pytest.fixture
def net():
    return fp.compile(Two(), (torch.ones(4, 3, 2), torch.ones(4, 5, dtype=torch.int64)), deterministic=True)


def batch(rows):
    draw = np.random.default_rng(0)
    return {
        "image": draw.random((rows, 3, 2), np.float32),
        "token": draw.integers(0, 9, (rows, 5)),
        "id": np.arange(rows),
    }


@pytest.mark.parametrize("rows", [0, 1, 4, 11])
def test_any_number_of_rows_runs_in_parts_of_the_plan_s_size(net, rows, tmp_path):
    net.save(tmp_path / "a.fmtplan")
    given = batch(rows)
    for source in (net, tmp_path / "a.fmtplan", (tmp_path / "a.fmtplan").read_bytes()):
        made = Predictor(source, outputs=("sum", "double"), drop=["image"])(given)
        assert set(made) == {"token", "id", "sum", "double"}
        assert made["id"] is given["id"]
        assert made["sum"].shape == (rows, 1)
        if rows:
            np.testing.assert_allclose(made["sum"], given["image"].reshape(rows, -1).sum(1, keepdims=True), rtol=1e-5)
            assert np.array_equal(made["double"], given["token"] * 2)


def test_errors_name_column_and_row(net):
    predict = Predictor(net)
    assert predict.outputs == tuple(name for name, _ in net.plan.outputs)
    with pytest.raises(InputError, match="the batch has no column 'token'; it has 'image'"):
        predict({"image": batch(2)["image"]})
    ragged = np.empty(2, object)
    ragged[0], ragged[1] = np.ones((3, 2), np.float32), np.ones((3, 3), np.float32)
    with pytest.raises(InputError, match=r"row 1 of column 'image' has shape \(3, 3\), the model takes \(3, 2\)"):
        predict({**batch(2), "image": ragged})
    with pytest.raises(InputError, match=r"column 'token' holds float32, the model takes torch.int64"):
        predict({**batch(2), "token": np.ones((2, 5), np.float32)})
    with pytest.raises(InputError, match="holds <U1"):
        predict({**batch(2), "image": np.full((2, 3, 2), "a")})
    with pytest.raises(InputError, match="different numbers of rows: image has 2, token has 3"):
        predict({**batch(2), "token": batch(3)["token"]})
    with pytest.raises(InputError, match=r"column 'token' holds uint64, the model takes torch.int64"):
        predict({**batch(2), "token": np.full((2, 5), 2**63, np.uint64)})
    with pytest.raises(InputError, match="the batch has a column 'id' already: name the results by outputs="):
        Predictor(net, outputs=("id", "double"))(batch(2))
    with pytest.raises(InputError, match="has 2 results, got outputs="):
        Predictor(net, outputs=("a",))
    with pytest.raises(InputError, match="threads must be a whole number"):
        Predictor(net, threads=0)
    with pytest.raises(InputError, match="each must begin with the same batch axis"):
        Predictor(fp.compile(torch.nn.Flatten(0), torch.ones(2, 3)))


def test_rows_that_depend_on_each_other_are_no_data_set():
    with pytest.raises(InputError, match="the results of a row must depend on that row alone"):
        Predictor(fp.compile(torch.nn.Softmax(0), torch.ones(2, 3)))


def test_an_error_of_the_model_names_the_row():
    predict = Predictor(fp.compile(torch.nn.Embedding(5, 2), torch.zeros(4, 3, dtype=torch.int64), deterministic=True))
    (name,) = (spec.name for spec in predict.rows.inputs)
    index = np.zeros((7, 3), np.int64)
    index[6] = 5
    with pytest.raises(InputError, match="row 6: "):
        predict({name: index})


class Fragile:
    """A predictor whose actor dies once, in the middle."""

    def __init__(self, path, mark):
        self.predict, self.mark = Predictor(path, outputs=("sum", "double")), mark

    def __call__(self, given):
        if given["id"][0] >= 40 and not os.path.exists(self.mark):
            open(self.mark, "w").close()
            os._exit(1)
        threads = torch.get_num_threads()
        return {**self.predict(given), "threads": np.full(len(given["id"]), threads)}


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # Ray's own
@pytest.mark.parametrize(("workers", "cpus"), [(2, 2), (4, 1)])
def test_actors_of_which_one_dies_give_every_row_once(net, tmp_path, workers, cpus):
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'fmtprop[ray]'")
    net.save(tmp_path / "a.fmtplan")
    ray.init(num_cpus=6, include_dashboard=False, ignore_reinit_error=True, log_to_driver=False)
    try:
        rows = [{name: column[i] for name, column in batch(96).items()} for i in range(96)]
        done = (
            ray.data.from_items(rows)
            .repartition(8)
            .map_batches(
                Fragile,
                fn_constructor_args=(str(tmp_path / "a.fmtplan"), str(tmp_path / "died")),
                concurrency=workers,
                num_cpus=cpus,
                batch_size=7,
                batch_format="numpy",
            )
            .take_all()
        )
    finally:
        ray.shutdown()
    assert (tmp_path / "died").exists()
    assert sorted(row["id"] for row in done) == list(range(96))
    assert {row["threads"] for row in done} == {cpus}
    for row in done:
        np.testing.assert_allclose(row["sum"], [row["image"].sum()], rtol=1e-5)
