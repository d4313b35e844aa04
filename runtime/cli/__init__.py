"""The command line: the ``penstock`` command.

Nothing heavy (torch, Ray, transformers) is imported before a command needs it, so that ``penstock --help`` is quick.
"""

from penstock.runtime.cli.app import main

__all__ = ["main"]
