"""Trackers of experiments, which are told how a run goes: one module each, behind a small protocol."""
