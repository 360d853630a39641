"""Shakespeare: who speaks, in which order, and samples that never reach into another split."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from asyncfed.data import Shakespeare, load_shakespeare
from asyncfed.data.shakespeare import lines_by_speaker
from asyncfed.errors import DataError

real = os.environ.get("ASYNCFED_DATA")
needs_shakespeare = pytest.mark.skipif(
    real is None or not Path(real, "shakespeare", "tinyshakespeare.txt").is_file(),
    reason="ASYNCFED_DATA does not point to a directory with shakespeare/tinyshakespeare.txt",
)

PLAY = """First Citizen:
Before we proceed any further, hear me speak.
Mark me:

All:
Speak, speak.

LADY  CAPULET:


First Citizen:
You are all resolved?

LADY CAPULET:
I am the last.
"""


def play(speakers: int = 4, lines: int = 10) -> str:
    """Everybody speaks in turn, and no line is said twice."""
    return "\n\n".join(
        f"S{s}:\nspeaker {s} says line {line:02}" for line in range(lines) for s in range(speakers)
    )


def written(root: Path, text: str) -> Path:
    (root / "shakespeare").mkdir()
    (root / "shakespeare" / "tinyshakespeare.txt").write_text(text)
    return root


def text_of(shakespeare: Shakespeare, codes: torch.Tensor) -> str:
    return "".join((shakespeare.characters + "\0")[code] for code in codes.tolist())


def spoken(shakespeare: Shakespeare, split: str, client: int) -> str:
    """A client's text in a split, put together again from samples one character apart."""
    x, y = getattr(shakespeare.data, split).of(client)
    return text_of(shakespeare, torch.cat((x[0], y[:, -1])))


def test_a_play_is_blocks_of_a_name_and_lines() -> None:
    assert lines_by_speaker(PLAY) == {
        "First Citizen": [
            "Before we proceed any further, hear me speak.",
            "Mark me:",
            "You are all resolved?",
        ],
        "All": ["Speak, speak."],
        "LADY CAPULET": ["I am the last."],
    }
    with pytest.raises(DataError, match="a block begins with 'Speak'; it must begin with 'NAME:'"):
        lines_by_speaker("ROMEO:\nAy me.\n\nSpeak\nagain.")


def test_lines_are_split_from_the_beginning(tmp_path: Path) -> None:
    found = load_shakespeare(2, 5, 1, min_characters=50, root=written(tmp_path, play()))
    for client, speaker in enumerate(found.speakers):
        lines = [f"speaker {speaker[1:]} says line {line:02}" for line in range(10)]
        assert spoken(found, "train", client) == "\n".join(lines[:6])
        assert spoken(found, "validation", client) == "\n".join(lines[6:8])
        assert spoken(found, "test", client) == "\n".join(lines[8:])


def test_a_sample_is_some_characters_and_what_follows_each(tmp_path: Path) -> None:
    root = written(tmp_path, "A:\n" + "\n".join(["abcdefghij"] * 5))
    found = load_shakespeare(1, 8, 3, min_characters=1, root=root)
    x, y = found.data.test.of(0)
    assert (x.dtype, y.dtype) == (torch.int64, torch.int64)
    assert [text_of(found, row) for row in x] == ["abcdefgh"]
    assert [text_of(found, row) for row in y] == ["bcdefghi"]
    x, y = found.data.train.of(0)
    text = "abcdefghij\nabcdefghij\nabcdefghij"
    assert [text_of(found, row) for row in x] == [text[i : i + 8] for i in range(0, 24, 3)]
    assert [text_of(found, row) for row in y] == [text[i + 1 : i + 9] for i in range(0, 24, 3)]


def test_a_sample_may_be_some_characters_and_the_next_one(tmp_path: Path) -> None:
    root = written(tmp_path, "A:\n" + "\n".join(["abcdefghij"] * 5))
    found = load_shakespeare(1, 8, 3, "last", min_characters=1, root=root)
    x, y = found.data.test.of(0)
    assert (x.dtype, y.dtype) == (torch.int64, torch.int64)
    assert [text_of(found, row) for row in x] == ["abcdefgh"]
    assert text_of(found, y) == "i"
    x, y = found.data.train.of(0)
    text = "abcdefghij\nabcdefghij\nabcdefghij"
    assert [text_of(found, row) for row in x] == [text[i : i + 8] for i in range(0, 24, 3)]
    assert text_of(found, y) == "".join(text[i + 8] for i in range(0, 24, 3))


def test_rare_characters_share_the_last_place(tmp_path: Path) -> None:
    root = written(tmp_path, "A:\n" + "\n".join(["aaabbbaaabbb", "aaabzbaaabxb"] * 5))
    found = load_shakespeare(1, 4, 1, min_characters=1, vocabulary=4, root=root)
    assert found.characters == "\nab"
    assert found.classes == 4
    assert spoken(found, "train", 0)[13:25] == "aaab\0baaab\0b"
    assert load_shakespeare(1, 4, min_characters=1, root=root).characters == "\n:Aabxz"


def test_the_seed_draws_speakers_in_their_order_of_appearance(tmp_path: Path) -> None:
    root = written(tmp_path, play(speakers=9))
    first, again, other = (load_shakespeare(4, 5, min_characters=50, seed=s, root=root) for s in (1, 1, 2))
    assert first.speakers == again.speakers == tuple(sorted(first.speakers))
    assert torch.equal(first.data.train.tensors[0], again.data.train.tensors[0])
    assert first.speakers != other.speakers
    assert first.characters == other.characters


def test_speakers_with_little_text_are_left_out(tmp_path: Path) -> None:
    root = written(tmp_path, play(3) + "\n\nBRIEF:\nAy.\n\nLONG:\n" + "one line only " * 40)
    found = load_shakespeare(3, 5, min_characters=50, root=root)
    assert found.speakers == ("S0", "S1", "S2")
    with pytest.raises(
        DataError, match="4 clients were asked for, but only 3 of 5 speakers have 50 characters"
    ):
        load_shakespeare(4, 5, min_characters=50, root=root)
    with pytest.raises(DataError, match="only 0 of 5 speakers have 50 characters and a sample of 200"):
        load_shakespeare(1, 200, min_characters=50, root=root)
    whole = load_shakespeare(1, 200, min_characters=500, fractions=(1, 0, 0), root=root)
    assert whole.speakers == ("LONG",)
    assert whole.data.test.sizes.tolist() == [0]


def test_a_missing_text_is_named_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCFED_DATA", str(tmp_path))
    with pytest.raises(DataError) as caught:
        load_shakespeare()
    for word in (str(tmp_path / "shakespeare"), "tinyshakespeare.txt", "ASYNCFED_DATA", "https://"):
        assert word in str(caught.value)
    written(tmp_path, "")
    (tmp_path / "shakespeare" / "tinyshakespeare.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot be read"):
        load_shakespeare()


def test_numbers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(
        DataError, match="load_shakespeare: stride is 0; it must be a whole number, at least 1"
    ):
        load_shakespeare(stride=0)
    with pytest.raises(
        DataError, match="load_shakespeare: vocabulary is 1; it must be a whole number, at least 2"
    ):
        load_shakespeare(vocabulary=1)
    with pytest.raises(DataError, match="load_shakespeare: positions is 'lats'; did you mean 'last'"):
        load_shakespeare(positions="lats")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="fractions are"):
        load_shakespeare(fractions=(0.5, 0.5, 0.5))


@needs_shakespeare
def test_the_real_text() -> None:
    assert real is not None
    text = Path(real, "shakespeare", "tinyshakespeare.txt").read_text()
    lines = lines_by_speaker(text)
    assert len(lines) == 308
    assert list(lines)[:4] == ["First Citizen", "All", "Second Citizen", "MENENIUS"]
    assert lines["First Citizen"][0] == "Before we proceed any further, hear me speak."
    assert lines["SAMPSON"][0] == "Gregory, o' my word, we'll not carry coals."
    found = load_shakespeare(stride=1)
    assert found.classes == 66
    assert len(set(found.speakers)) == 20
    for client, speaker in enumerate(found.speakers):
        whole = "\n".join(lines[speaker])
        assert len(whole) >= 2000
        # Train, validation and test are that speaker's lines, one after another, and nothing twice.
        parts = [spoken(found, split, client) for split in ("train", "validation", "test")]
        assert "\n".join(parts) == whole
        assert len(parts[0].split("\n")) == pytest.approx(0.6 * len(lines[speaker]), abs=1)
