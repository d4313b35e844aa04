"""Evaluation: what its datasets are, and the figures that come of the answers."""
