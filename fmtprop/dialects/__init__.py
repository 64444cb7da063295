"""Dialects: how DirectML and XLA describe a tensor in memory, each converted to and from `MemoryDesc`.

Pure arithmetic, like the layout room. The dialects do not know each other.
"""
