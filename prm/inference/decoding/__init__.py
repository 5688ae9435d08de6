"""Decoding guided by a user's reward."""

from prm.inference.decoding.best_of_n import Candidates, chance_win, choose, sample_candidates

__all__ = ["Candidates", "chance_win", "choose", "sample_candidates"]
