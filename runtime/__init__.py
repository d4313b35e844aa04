"""The shells: what carries the actors. The only place that knows Ray, ZMQ, clocks and signals."""
