"""The command line: list, run, show, trace.

Nothing heavy is imported until a command needs it, so that `asyncfed --help` answers at once. Results go to
stdout, progress and errors to stderr.
"""

from asyncfed.cli.app import app, main

__all__ = ["app", "main"]
