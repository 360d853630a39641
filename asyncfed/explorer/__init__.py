"""The trace explorer: a page in the browser, served from this machine, that answers about windows of runs."""

from asyncfed.explorer.runs import ExploredRun, opened
from asyncfed.explorer.server import ExplorerServer

__all__ = ["ExploredRun", "ExplorerServer", "opened"]
