"""How models run for evaluation: engines that generate and embed, and decoding guided by a reward."""
