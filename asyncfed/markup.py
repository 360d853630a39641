"""What is shown in notebooks and reports: words as HTML, escaped, without scripts and styles of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape


def panel(title: str, pairs: Mapping[str, str]) -> str:
    """A heading, and a line for each name and what is said of it."""
    lines = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(words)}</td></tr>'
        for name, words in pairs.items()
    )
    return f"<table><caption>{escape(title)}</caption><tbody>{lines}</tbody></table>"


def text_table(columns: Sequence[tuple[str, Sequence[str], bool]], caption: str) -> str:
    """Columns of text, each a name, its cells, and whether it stands to the right."""
    marks = [' class="number"' if right else "" for _, _, right in columns]
    heads = "".join(
        f'<th scope="col"{mark}>{escape(name)}</th>'
        for (name, _, _), mark in zip(columns, marks, strict=True)
    )
    rows = "".join(
        "<tr>"
        + "".join(f"<td{mark}>{escape(cell)}</td>" for cell, mark in zip(cells, marks, strict=True))
        + "</tr>"
        for cells in zip(*(texts for _, texts, _ in columns), strict=True)
    )
    return (
        f'<div class="wide"><table><caption>{escape(caption)}</caption><thead><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )
