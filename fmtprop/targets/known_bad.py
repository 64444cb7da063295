"""Combinations that some versions of oneDNN get wrong or run badly; they are routed around.

Each row names the versions, what matches and where the defect is described. A combination that fails the plan's own
check (see :mod:`fmtprop.runtime.selfcheck`) belongs here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fmtprop.ir.node import Node
from fmtprop.passes.formats import plain
from fmtprop.passes.target import Request

Version = tuple[int, ...]


@dataclass(frozen=True)
class KnownBad:
    """One defect.

    Parameters
    ----------
    first, fixed : tuple of int
        Versions from ``first`` on and before ``fixed`` have it.
    matches : callable
        ``(node, request) -> bool``.
    why : str
        What goes wrong.
    """

    first: Version
    fixed: Version
    matches: Callable[[Node, Request], bool]
    why: str


def _resampling_with_tail_not_row_major(node: Node, request: Request) -> bool:
    tail = any(post_op.op in ("sum", "binary") for post_op in node.post_ops)
    return node.op == "resampling" and tail and request["src"] != plain(request["src"])


def _binary_tail_not_dense(node: Node, request: Request) -> bool:
    tails = [post_op.operand for post_op in node.post_ops if post_op.op == "binary" and post_op.operand]
    return any(request[name].kind == "blocked" and not request[name].is_dense for name in tails)


KNOWN_BAD: tuple[KnownBad, ...] = (
    KnownBad(
        (3, 0),
        (3, 4),
        _resampling_with_tail_not_row_major,
        "resampling with sum or binary post-ops gives wrong results in any format but row-major",
    ),
    KnownBad(
        (3, 0),
        (3, 4),
        _binary_tail_not_dense,
        "binary post-op with a non-dense source gives wrong results",
    ),
)


def known_bad(version: Version, node: Node, request: Request) -> str | None:
    """Return why this combination must not be used with this library version, or None."""
    for row in KNOWN_BAD:
        if row.first <= version < row.fixed and row.matches(node, request):
            return row.why
    return None
