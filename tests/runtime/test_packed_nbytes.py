"""The bytes that packing will write, which a compilation keeps time for."""

import fmtprop as fp
from fmtprop.runtime.constants import packed_nbytes


def test_packing_writes_constants_and_what_runs_once_on_them():
    net = fp.compile("chain", policy="naive")
    graph = net.compilation.formatted
    constants = sum(node.descs[0].nbytes for node in graph.nodes() if node.op == "constant")
    computed = sum(desc.nbytes for node in net.plan.packed for desc in node.descs)
    assert packed_nbytes(graph) == constants + computed > constants > 0
