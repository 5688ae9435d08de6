"""Training: the Lightning module, samplers, strategies and the command line of the recipes."""
