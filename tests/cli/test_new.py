"""`asyncfed new`: a file to start from."""

from __future__ import annotations
