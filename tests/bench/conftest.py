"""Fixtures of the benchmarks' tests."""

from tests.forks import forked_contenders as forked_contenders
