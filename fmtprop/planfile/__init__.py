"""The plan file: a compiled model as one file of plain data.

A safetensors file: a header of JSON, the document (JSON too) as its first entry, then the packed weights. The document
has the formatted graph with the choice of every node, what the machine was, and the digest of every block of weights.
:mod:`~fmtprop.planfile.container` owns the bytes, :mod:`~fmtprop.planfile.document` the graph as plain data,
:mod:`~fmtprop.planfile.environment` what must fit, :mod:`~fmtprop.planfile.rebuild` the implementations that the
choices name. Nothing here plans or runs a model, and nothing in a file is trusted.
"""
