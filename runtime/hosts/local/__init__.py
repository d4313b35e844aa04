"""The local host: every actor is forked from one warm process on this machine, without Ray.

For tests, notebooks and quick trials: actors are up within a second of the last import. Boot, links, heartbeats,
fencing, replacement, stop and resume are those of :mod:`penstock.runtime.hosts.ray`; only who starts and kills a
process differs.
"""
