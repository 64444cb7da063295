"""oneDNN's names and numbers: data types, propagation kinds, algorithms, flags.

Must not touch the library: the numbers come from the generated table.
"""

from __future__ import annotations

from enum import IntFlag

from fmtprop.dnnl import _abi
from fmtprop.errors import UnsupportedOpError

_DATA_TYPES = _abi.ENUMS["dnnl_data_type_t"]
_PROP_KINDS = _abi.ENUMS["dnnl_prop_kind_t"]
_ALGORITHMS = _abi.ENUMS["dnnl_alg_kind_t"]
_DIRECTIONS = _abi.ENUMS["dnnl_rnn_direction_t"]
_KINDS = {number: name for name, number in reversed(_abi.ENUMS["dnnl_primitive_kind_t"].items())}
_DATA_TYPE_NAMES = {number: name for name, number in _DATA_TYPES.items()}
QUERY = _abi.ENUMS["dnnl_query_t"]
FORMAT_KIND = _abi.ENUMS["dnnl_format_kind_t"]


class NormFlags(IntFlag):
    """Flags of the normalization primitives (``dnnl_normalization_flags_t``).

    ``FUSE_NORM_RELU`` needs a workspace in training; ``FUSE_NORM_ADD_RELU`` is batch normalization only.
    """

    NONE = 0
    USE_GLOBAL_STATS = _abi.ENUMS["dnnl_normalization_flags_t"]["use_global_stats"]
    USE_SCALE = _abi.ENUMS["dnnl_normalization_flags_t"]["use_scale"]
    USE_SHIFT = _abi.ENUMS["dnnl_normalization_flags_t"]["use_shift"]
    FUSE_NORM_RELU = _abi.ENUMS["dnnl_normalization_flags_t"]["fuse_norm_relu"]
    FUSE_NORM_ADD_RELU = _abi.ENUMS["dnnl_normalization_flags_t"]["fuse_norm_add_relu"]


class RnnFlags(IntFlag):
    """Flags of the recurrent primitives (``dnnl_rnn_flags_t``)."""

    NONE = 0
    DIFF_WEIGHTS_OVERWRITE = _abi.ENUMS["dnnl_rnn_flags_t"]["rnn_flags_diff_weights_overwrite"]


def data_type(name: object) -> int:
    """Return the ``dnnl_data_type_t`` of a data type.

    `name`: such as ``"f32"``. Raises UnsupportedOpError if oneDNN has no such data type.
    """
    return _number(_DATA_TYPES, str(getattr(name, "value", name)), "data type")


def data_type_name(number: int) -> str:
    """Return the name of a ``dnnl_data_type_t`` value."""
    return _DATA_TYPE_NAMES[number]


def prop_kind(name: str) -> int:
    """Return the ``dnnl_prop_kind_t`` of a name such as ``"forward_inference"``.

    Raises UnsupportedOpError if oneDNN has no such propagation kind.
    """
    return _number(_PROP_KINDS, name, "propagation kind")


def algorithm(name: str) -> int:
    """Return the ``dnnl_alg_kind_t`` of a name such as ``"eltwise_relu"``.

    Raises UnsupportedOpError if oneDNN has no such algorithm.
    """
    return _number(_ALGORITHMS, name, "algorithm")


def rnn_direction(name: str) -> int:
    """Return the ``dnnl_rnn_direction_t`` of a name such as ``"unidirectional_left2right"``.

    Raises UnsupportedOpError if oneDNN has no such direction.
    """
    return _number(_DIRECTIONS, name, "direction of a recurrent layer")


def primitive_kind_name(number: int) -> str:
    """Return the name of a ``dnnl_primitive_kind_t`` value, such as ``"convolution"``."""
    return _KINDS.get(number, f"primitive kind {number}")


def _number(table: dict[str, int], name: str, what: str) -> int:
    try:
        return table[name]
    except KeyError:
        known = ", ".join(table)
        raise UnsupportedOpError(f"oneDNN has no {what} {name!r}; known: {known}") from None
