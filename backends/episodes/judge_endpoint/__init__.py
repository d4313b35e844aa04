"""Embedded engines that answer a judge beside their samples (``reward.judge.engine: self``)."""
