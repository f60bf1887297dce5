"""Benchmark: question suites, timed runs over them, and the report."""
