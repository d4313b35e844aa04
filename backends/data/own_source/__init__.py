"""Rows that a class of the user's makes while the run goes on (``data.source``)."""
