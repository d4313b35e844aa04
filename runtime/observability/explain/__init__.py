"""What binds a run, from its folder alone: measured facts, the bound that is active, causes in order, alarms, knobs."""

from penstock.runtime.observability.explain.explanation import Explanation, explain

__all__ = ["Explanation", "explain"]
