"""Other ways to compute a node or a few nodes, among which the exact problem chooses by cost."""
