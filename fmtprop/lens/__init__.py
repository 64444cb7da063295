"""PyTorch's hidden reorders: which module and which line of a program cause them, and what would save them.

``tracer.py`` watches operators and reads oneDNN's log between two of them, ``findings.py`` adds up what it saw,
``shadow.py`` predicts what channels_last saves,
``variants.py`` runs a model in other ways, ``script.py`` runs a program under the tracer. Nothing here changes a model.
The package loads nothing by itself: the command line reads findings without torch.
"""
