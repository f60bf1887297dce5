"""The benchmark: suites of questions, timed runs over them, and the report."""
