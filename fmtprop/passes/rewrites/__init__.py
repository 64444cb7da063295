"""Rewrites to normal form: patterns recognised, constants folded, views removed, functions fused."""
