"""How large a model from anywhere may be, in all the ways in which a small file can ask for much.

The limits are far above what exporters write. Whoever has a model beyond one can cut it, or import it from PyTorch.
"""

from __future__ import annotations

from typing import Final

#: bytes of a file without its external data: protobuf itself reads no more
FILE_NBYTES: Final = (1 << 31) - 1
#: fields of all messages in a file
FIELDS: Final = 1_000_000
#: bytes of a file whose fields need not be counted: it has too few of them
SMALL_NBYTES: Final = 1 << 21
#: messages within messages: graphs in attributes of nodes take four levels each
MESSAGE_DEPTH: Final = 80
#: nodes of all graphs, with functions written out
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
#: elements along one axis, and of an input, as far as they are declared
AXIS_ELEMENTS: Final = 1 << 40
#: nodes that loops may run in one run of a model, node by node: half a minute of small ones
LOOP_STEPS: Final = 1_000_000
#: bytes that the state and the rows of a loop may have
LOOP_NBYTES: Final = 1 << 30
#: opset versions of ONNX's own domain that are understood; older models are converted by onnx.version_converter
OLDEST_OPSET: Final = 7
NEWEST_OPSET: Final = 28
