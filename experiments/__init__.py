"""The evidence behind docs/results.md: methods, suites of comparisons and their analysis. Only `cli` imports it."""
