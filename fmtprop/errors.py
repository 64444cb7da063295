"""Every error that a user of fmtprop can meet.

::

    FmtpropError
    ├── ShapeError            dimensions, strides, indices or attributes that do not fit
    │   └── ScaleError        a quantization has a scale that is no positive number
    ├── FormatError           a memory format cannot express a view, a conversion or a dialect
    ├── UnsupportedOpError    no target can run the op, data type or attribute
    │   └── OptionError       an option has an unknown value
    ├── GraphError            a graph is malformed
    │   └── VerifyError       a numbered verifier rule is broken
    ├── PassError             a graph pass failed; names the pass and its predecessors
    ├── ImportModelError      a model or file cannot be imported
    ├── InputError            a run-time input does not fit the compiled model
    ├── PlanError             a formatted graph cannot be planned or executed
    └── LibraryError          the oneDNN library
        ├── LoadError         cannot be found or loaded
        ├── DnnlError         answered with an error status
        └── HandleError       a native handle was used after it was closed, or copied

A message names the node, the operand and axis, the value, the rule and the remedy. If an operator of PyTorch refuses
its operands in a run, the error is of PyTorch's class too, such as ``IndexError`` or ``torch.linalg.LinAlgError``.
"""

from __future__ import annotations

from fmtprop.system.printable import printable_lines

#: longest message, in characters: a name from a file may be a million times as long
_MOST_CHARACTERS = 4000


#: remedy of a model that changes tensors in place, such as a cache of keys and values
IN_PLACE_REMEDY = 'run it by torch.compile(model, backend="fmtprop"), which writes to caches without a copy'


class FmtpropError(Exception):
    """Base class of every error that fmtprop raises on purpose.

    Parameters
    ----------
    message : str
        The problem. It may contain text from files: it is escaped and shortened here.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(printable_lines(message, _MOST_CHARACTERS))


class ShapeError(FmtpropError, ValueError):
    """Dimensions, strides, indices or attributes do not fit each other."""


class ScaleError(ShapeError):
    """A quantization has a scale that is 0, negative, infinite or NaN."""


class FormatError(FmtpropError, ValueError):
    """A memory format cannot express a view, a conversion or a dialect.

    For example, a blocked format cannot be reshaped (SPEC M8), or a layout has no counterpart in another dialect
    (SPEC A1).
    """


class UnsupportedOpError(FmtpropError):
    """No target can run the op with these data types and attributes."""


class OptionError(UnsupportedOpError, ValueError):
    """An option of a compilation has a value that it cannot have."""


class GraphError(FmtpropError):
    """A graph is malformed: unknown names, cycles, missing operands, foreign data."""


class VerifyError(GraphError):
    """A numbered rule of the graph verifier is broken.

    Parameters
    ----------
    rule : str
        Rule number, such as ``"V7"``; ``docs/verifier.md`` lists them all.
    message : str
        The problem, with node, operand and value.
    """

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule


class PassError(FmtpropError):
    """A graph pass failed; the message names the pass, the cause is chained."""


class ImportModelError(FmtpropError):
    """A model or a file cannot be imported."""


class InputError(FmtpropError, ValueError):
    """A run-time input does not fit the compiled model: number, shape, data type or device."""


class PlanError(FmtpropError):
    """A formatted graph cannot be turned into a plan, or a plan cannot be executed here."""


class LibraryError(FmtpropError):
    """Base class of errors of the oneDNN library."""


class LoadError(LibraryError, ImportError):
    """The oneDNN library cannot be found or loaded; the message lists the places that were searched."""


class HandleError(LibraryError):
    """A native handle was used after it was closed, copied or pickled."""


class DnnlError(LibraryError, RuntimeError):
    """A oneDNN call answered with an error status.

    Parameters
    ----------
    function : str
        Name of the C function.
    status : str
        Name of the ``dnnl_status_t`` value, such as ``"invalid_arguments"``.
    details : str, optional
        Operand descriptors, the rule and the remedy.
    repro : str, optional
        A benchdnn command line that reproduces the call.
    """

    def __init__(self, function: str, status: str, details: str = "", repro: str = "") -> None:
        text = f"{function} answered {status}"
        if details:
            text += f": {details}"
        if repro:
            text += f"\n  reproduce with: {repro}"
        super().__init__(text)
        self.function = function
        self.status = status
        self.details = details
        self.repro = repro
