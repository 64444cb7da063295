"""Data types: where a graph computes in fewer bits, and which numbers must not."""
