"""Plans behind any server: rows of requests in, rows of results out, and the Open Inference Protocol v2.

:class:`Rows` runs any number of rows by the plans there are, :class:`Batcher` joins the requests that wait, and
:class:`Service` speaks the protocol. None of them knows a web framework: :mod:`fmtprop.ray.serve` and the programs in
``examples/serving`` are the same few calls from Ray Serve, FastAPI, LitServe, MLServer and Triton.
"""

from fmtprop.serving.batching import Batcher
from fmtprop.serving.engine import Engine, Spec
from fmtprop.serving.protocol import RequestError
from fmtprop.serving.rows import Rows
from fmtprop.serving.service import Answer, Service

__all__ = ["Answer", "Batcher", "Engine", "RequestError", "Rows", "Service", "Spec"]
