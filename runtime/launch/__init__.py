"""Beginning a run, going on with it, evaluating a model: what the command line and ``penstock.api`` both call.

It stands above the hosts and below whoever shows something to people.
"""
