"""Limits on models from unknown sources, as a small file can ask for much time or memory.

The limits are far above the models of exporters. A larger model can be cut in parts, or imported from PyTorch.
"""

from __future__ import annotations

from typing import Final

#: bytes of a file without its external data, protobuf's own limit
FILE_NBYTES: Final = (1 << 31) - 1
#: fields of all messages in a file
FIELDS: Final = 1_000_000
#: bytes of a small file: its fields need not be counted, as it has too few
SMALL_NBYTES: Final = 1 << 21
#: messages within messages: graphs in attributes of nodes take four levels each
MESSAGE_DEPTH: Final = 80
#: nodes of all graphs, after functions are inlined
NODES: Final = 200_000
#: graphs within graphs
GRAPH_DEPTH: Final = 16
#: functions that call functions
FUNCTION_DEPTH: Final = 32
#: initialisers of one graph
INITIALISERS: Final = 100_000
#: characters of a name
NAME_CHARACTERS: Final = 4096
#: inputs or outputs of a node or graph
OPERANDS: Final = 10_000
#: axes of a tensor
AXES: Final = 64
#: declared elements along one axis, and of an input
AXIS_ELEMENTS: Final = 1 << 40
#: elements along an axis of which an operator lists the sources one by one, such as padding by edges
PLACES: Final = 1 << 24
#: calls of PyTorch's functions that a model may become: some seconds of them
CALLS: Final = 50_000
#: nodes that loops may run in one run of a model: half a minute of small nodes
LOOP_STEPS: Final = 1_000_000
#: bytes of the state and the rows of a loop
LOOP_NBYTES: Final = 1 << 30
#: oldest opset version of ONNX's own domain that is read directly; onnx.version_converter converts older models
OLDEST_OPSET: Final = 7
NEWEST_OPSET: Final = 28
