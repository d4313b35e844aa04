"""Environments that episodes of yours can play in, each an :class:`~penstock.backends.episodes.interfaces.Environment`.

The adapter for Gymnasium is in a module of its own, :mod:`penstock.backends.episodes.environments.gymnasium_text`, as
that package is an extra.
"""

from penstock.backends.episodes.environments.openenv import OpenEnvironment, OpenEnvServer

__all__ = ["OpenEnvServer", "OpenEnvironment"]
