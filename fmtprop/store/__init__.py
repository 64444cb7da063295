"""Results found on this machine, shared by all processes of a user: figures, verdicts, passed checks and choices."""

from __future__ import annotations

from fmtprop.store.directory import cache_directory
from fmtprop.store.store import Store, key_of
from fmtprop.store.texts import keep_text, text_of

__all__ = ["Store", "cache_directory", "keep_text", "key_of", "text_of"]
