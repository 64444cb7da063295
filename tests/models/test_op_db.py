"""No operator of PyTorch's database is computed wrongly, and none takes its process down."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("expecttest", reason="PyTorch's operator database needs it: pip install 'fmtprop[models]'")

from tests.models import op_db


@pytest.mark.slow
def test_the_operator_database_is_right_or_refused():
    names = sorted({op_db.name_of(info) for info in op_db.operators()})
    outcomes = list(op_db.run(names, ["--most=4"]))
    assert sum(outcome.status == "right" for outcome in outcomes) > 1000
    assert [str(outcome) for outcome in outcomes if outcome.status in ("wrong", "crashed")] == []
    refused, known = op_db.listing([o for o in outcomes if o.status == "refused"]), op_db.REFUSED.read_text("utf-8")
    if refused.splitlines()[0] == known.splitlines()[0]:  # another version says it in other words
        assert refused == known


@pytest.mark.slow
def test_the_operator_database_is_right_through_dynamo():
    names = sorted({op_db.name_of(info) for info in op_db.operators()})
    outcomes = list(op_db.run(names, ["--most=2", "--dynamo"]))
    assert sum(outcome.status == "right" for outcome in outcomes) > 1000
    assert [str(outcome) for outcome in outcomes if outcome.status not in ("right", "skipped")] == []


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "flag"), [(torch.bfloat16, "--dtype=bfloat16"), (torch.float32, "--errors")])
def test_bf16_and_errors_are_those_of_pytorch_through_dynamo(dtype, flag):
    names = sorted({op_db.name_of(info) for info in op_db.operators(dtype)})
    outcomes = list(op_db.run(names, ["--most=2", "--dynamo", flag]))
    assert sum(outcome.status == "right" for outcome in outcomes) > 100
    assert [str(outcome) for outcome in outcomes if outcome.status not in ("right", "skipped")] == []
