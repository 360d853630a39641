"""Scenarios to run by name: `asyncfed list`, `asyncfed run quickstart`.

One file each: a docstring, whose first line is listed, and a function `scenario(**parameters)`.
"""
