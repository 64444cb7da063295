"""Passes from graph to graph: rewrites that normalise an imported graph, and the assignment of formats."""
