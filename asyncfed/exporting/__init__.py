"""Runs for other programs: timelines for Perfetto and Chrome, tables, and networks with what was measured."""

from asyncfed.exporting.formats import FORMATS, export

__all__ = ["FORMATS", "export"]
