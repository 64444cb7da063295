"""PyTorch's names without a public path that a backend of ``torch.compile`` takes."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._dynamo import config, explain
from torch._dynamo.backends import registry
from torch._dynamo.utils import counters
from torch._functorch import config as functorch
from torch._functorch._aot_autograd.schemas import OutputType, PlainTensorMeta

from fmtprop.ops.pytorch import FakeTensorMode

try:
    from torch._dynamo.aot_compile_types import SerializableCallable
except ImportError:  # PyTorch of before saves no functions
    SerializableCallable = object  # type: ignore[misc, assignment]

try:
    from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager
except ImportError:  # PyTorch of before has no artefacts of others
    CacheArtifact = CacheArtifactFactory = CacheArtifactManager = object  # type: ignore[misc, assignment]

#: results without a tensor that they share memory with
OWN_MEMORY = (OutputType.non_alias, OutputType.unsafe_view_alias)

#: names of the backends that were asked for -> their functions
backends = registry._COMPILER_FNS


def saves_functions() -> bool:
    """Return whether PyTorch compiles a graph to save it: then alone it compiles without a key."""
    return bool(getattr(functorch, "bypass_autograd_cache_key", False))


def pickled(module: fx.GraphModule) -> bytes:
    """Return the bytes of a graph, without what was recorded about its nodes."""
    from torch.fx._graph_pickler import GraphPickler, Options  # imports Inductor, which no other graph needs

    return GraphPickler.dumps(module, Options(ops_filter=None, node_metadata_key_filter=lambda key: False))


def unpickled(graph: bytes) -> Any:
    """Return the graph of bytes from a trusted source."""
    from torch.fx._graph_pickler import GraphPickler
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return GraphPickler.loads(graph, FakeTensorMode(shape_env=ShapeEnv()))
