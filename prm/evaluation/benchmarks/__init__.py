"""Benchmarks: which cases, which methods, which figures."""
