"""Dialects: how DirectML and XLA describe a tensor in memory, each converted to and from `MemoryDesc`.

Pure arithmetic, as the layout room below; one dialect knows nothing of the other.
"""
