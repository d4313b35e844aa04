"""Tools that episodes of yours can give to the model, each a :class:`~penstock.backends.episodes.interfaces.Tool`."""

from penstock.backends.episodes.tools.calculator import Calculator
from penstock.backends.episodes.tools.local_search import LocalSearch
from penstock.backends.episodes.tools.python_tool import PythonTool

__all__ = ["Calculator", "LocalSearch", "PythonTool"]
