"""The record of a run: every potential message on every edge, in columns."""

from asyncfed.network.waves import Status
from asyncfed.trace.columns import STATUS_NAMES, Totals
from asyncfed.trace.reader import Trace
from asyncfed.trace.writer import TraceWriter, clear

__all__ = ["STATUS_NAMES", "Status", "Totals", "Trace", "TraceWriter", "clear"]
