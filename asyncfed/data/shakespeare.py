"""Who says what in Shakespeare: one client per speaker, and the next character to be predicted.

The text is a list of blocks, a blank line apart, each a line "NAME:" and the lines that NAME then says. A
speaker's lines stay in the order of the plays, and are split into train, validation and test from the
beginning, so that a client is tested on what it says last. A sample is `length` characters and what
follows each of them, or (`positions="last"`) the last; it never reaches over the end of its split.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

import torch
from torch import Tensor

from asyncfed.checks import MOST, NonNegativeInt, PathLike, PositiveInt, Range, checked
from asyncfed.data.datasets import data_directory
from asyncfed.data.shards import ClientData, client_data_from_lists
from asyncfed.data.split import Fractions, check_fractions
from asyncfed.errors import DataError
from asyncfed.rng import Streams

_FOLDER, _FILE = "shakespeare", "tinyshakespeare.txt"
_ORIGIN = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"


@dataclass(frozen=True, eq=False)
class Shakespeare:
    """Samples (characters (length,), those that follow each (length,)) of every client, as places in
    `characters`; or (characters, the one that follows the last), if that is all that was asked for.

    A character that is not among them has the place after the last.
    """

    data: ClientData
    speakers: tuple[str, ...]
    characters: str

    @property
    def classes(self) -> int:
        return len(self.characters) + 1


@checked(error=DataError)
def load_shakespeare(
    clients: PositiveInt = 20,
    length: PositiveInt = 32,
    stride: PositiveInt = 4,
    positions: Literal["all", "last"] = "all",
    *,
    seed: int = 0,
    min_characters: NonNegativeInt = 2000,
    fractions: Fractions = (0.6, 0.2, 0.2),
    vocabulary: Annotated[int, Range(2, MOST)] = 80,
    root: PathLike | None = None,
) -> Shakespeare:
    """Read shakespeare/tinyshakespeare.txt in the data directory and draw some speakers.

    Parameters
    ----------
    clients
        How many speakers, drawn with `seed` among those with enough text, in the order of their appearance.
    length
        Characters in a sample.
    stride
        Distance between the beginnings of consecutive samples.
    positions
        What is to be predicted: what follows at "all" positions of a sample, or after the "last".
    min_characters
        Enough text is that many characters, and at least one sample in every split.
    fractions
        Of a speaker's lines: train, validation, test.
    vocabulary
        The most classes there may be; the most frequent characters get one each, all others share the last.
    root
        See `data_directory`.
    """
    check_fractions(fractions)
    text = _read(root)
    parts = {speaker: _split(lines, fractions) for speaker, lines in lines_by_speaker(text).items()}
    enough = [
        speaker
        for speaker, texts in parts.items()
        if sum(map(len, texts)) >= min_characters
        and all(len(own) > length for own, fraction in zip(texts, fractions, strict=True) if fraction)
    ]
    if clients > len(enough):
        raise DataError(
            f"{clients} clients were asked for, but only {len(enough)} of {len(parts)} speakers have "
            f"{min_characters} characters and a sample of {length} + 1 in every split; "
            "use fewer clients, a smaller min_characters or a smaller length"
        )
    drawn = Streams(seed).generator("speakers").choice(len(enough), size=clients, replace=False)
    speakers = tuple(enough[place] for place in sorted(drawn))
    characters = "".join(sorted(c for c, _ in Counter(text).most_common(vocabulary - 1)))
    train, validation, test = (
        [_samples(parts[speaker][split], characters, length, stride, positions) for speaker in speakers]
        for split in range(3)
    )
    return Shakespeare(client_data_from_lists(train, validation, test), speakers, characters)


def lines_by_speaker(text: str) -> dict[str, list[str]]:
    """Every speaker's lines in order; speakers in the order of their first appearance."""
    spoken: dict[str, list[str]] = {}
    for block in re.split(r"\n(?:[ \t]*\n)+", text.strip()):
        name, *lines = block.split("\n")
        if not name.endswith(":"):
            raise DataError(f"{_FILE}: a block begins with {name!r}; it must begin with 'NAME:'")
        spoken.setdefault(" ".join(name[:-1].split()), []).extend(lines)
    return spoken


def _read(root: str | os.PathLike[str] | None) -> str:
    folder = data_directory(root) / _FOLDER
    try:
        return (folder / _FILE).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise DataError(
            f"dataset 'shakespeare': {_FILE} not found in {folder}; save {_ORIGIN} there under that name, "
            f"or set ASYNCFED_DATA to the directory that holds {_FOLDER}/{_FILE}"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"dataset 'shakespeare': {folder / _FILE} cannot be read ({error}); fetch it again"
        ) from error


def _split(lines: list[str], fractions: Sequence[float]) -> list[str]:
    """The text of train, validation and test."""
    cuts = [round(len(lines) * sum(fractions[:count])) for count in range(4)]
    return ["\n".join(lines[start:stop]) for start, stop in pairwise(cuts)]


def _samples(
    text: str, characters: str, length: int, stride: int, positions: Literal["all", "last"]
) -> tuple[Tensor, Tensor]:
    place = {character: number for number, character in enumerate(characters)}
    codes = torch.tensor([place.get(character, len(characters)) for character in text], dtype=torch.int64)
    starts = torch.arange(0, max(0, len(codes) - length), stride)
    windows = codes[starts.unsqueeze(1) + torch.arange(length + 1)]
    return windows[:, :-1], windows[:, -1] if positions == "last" else windows[:, 1:]
