"""Evaluation: methods that answer for a user, metrics of what they answer, and the benchmarks that run both."""
