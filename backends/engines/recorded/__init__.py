"""An engine that generates nothing: it answers with the responses that the rows of the dataset hold."""

from penstock.backends.engines.recorded.opening import open_recorded_engine

__all__ = ["open_recorded_engine"]
