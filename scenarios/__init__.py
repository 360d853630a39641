"""Scenarios to run by name: `asyncfed list`, `asyncfed run quickstart`. One file each, with a function `scenario(**parameters)`."""
