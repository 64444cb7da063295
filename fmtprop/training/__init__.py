"""Training: a step's forward and backward half as one plan, behind PyTorch's autograd.

:mod:`fmtprop.training.capture` takes both halves from AOTAutograd, :mod:`fmtprop.training.step` plans and runs them as
one graph, :mod:`fmtprop.training.module` is the module that a user trains.
"""
