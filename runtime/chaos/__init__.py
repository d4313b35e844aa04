"""Chaos: a controller outside a real run that injects faults into it and gives a verdict at its end.

```
penstock chaos ── controller ── penstock run ── driver ── actors
                      │  signals to their processes
                      └─ links: every inbox announces a way through the controller, frames and bytes
```

Invariants:

* The run is the one that ``penstock run`` makes, in processes of its own. The only part of it that knows of chaos is
  the announcement of an inbox (:mod:`penstock.runtime.hosts.processes.rerouting`), and that only with a variable set.
* Only processes of the run are ever signalled (:mod:`penstock.runtime.chaos.watch`).
* The same seed draws the same faults at the same progress; what the machine makes of them differs each time.
"""
