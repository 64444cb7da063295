"""Results found on this machine, shared by all processes of a user: figures, verdicts and passed checks."""

from __future__ import annotations

from fmtprop.store.directory import cache_directory
from fmtprop.store.store import Store, key_of

__all__ = ["Store", "cache_directory", "key_of"]
