"""Rewrites of the graphs of training: sums of gradients joined, statistics recovered."""
