"""Programs that a model has written, run where they can harm nothing.

The names of this package are in its modules: nothing is imported here, as the process that builds the sandbox starts
from this package with the standard library alone.
"""
