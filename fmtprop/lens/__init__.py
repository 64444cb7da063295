"""PyTorch's hidden reorders: the modules and lines of a program that cause them, and ways to avoid them.

``tracer.py`` watches operators and reads oneDNN's log between two of them, ``findings.py`` adds up the log,
``variants.py`` runs a model in other ways, ``gain.py`` has a gain
with its interval, ``script.py`` runs a program under the tracer. Nothing here changes a model. The package loads
nothing by itself: the command line reads findings without torch.
"""
