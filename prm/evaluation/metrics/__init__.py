"""Figures of what was written and of how well rewards rank."""
