"""The Ray + ZMQ host: Ray places and starts processes, ZMQ carries the events, the driver supervises.

```
penstock run ── launcher ── driver (supervisor, Ray) ── raylet ── one process for each actor
```

Invariants:

* Every wait has a deadline, and every process of the run ends with the launcher or the driver, whichever ends first.
* Nothing that comes from a socket is unpickled. Who has no key of the run gets no frame in.
* An incarnation that was given up is announced as lost before its successor is started.
"""
