"""Experiments behind docs/results.md: training methods, comparison suites and analysis. Only `cli` imports them."""
