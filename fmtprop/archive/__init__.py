"""The safety of ``.pt2`` archives: a stranger's file is read and checked before PyTorch opens it."""
