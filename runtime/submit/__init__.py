"""Runs on clusters: what a scheduler is given, and what it is asked while the run goes on there.

Invariants:

* One run has one folder, from its first submission to its last: ``job/`` in it says what was submitted and as what.
* What a scheduler is given begins the run, or goes on with it: so the same may be submitted again, or started again by
  the scheduler itself.
* Nothing is submitted that the login node can see to be impossible, and the first step on the cluster is a dry run.
"""
