"""Streamed text is the whole text in pieces: no half characters, and nothing of a stop string."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier_engine.tokenizer import IncrementalDetokenizer, Tokenizer


class ByteTokenizer:
    """A vocabulary whose tokens are arbitrary bytes, as in byte-level BPE; token 0 is special and has no text."""

    chat_template = None

    def __init__(self, vocabulary: list[bytes]) -> None:
        self._vocabulary = vocabulary

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return b"".join(self._vocabulary[token - 1] for token in token_ids if token).decode(errors="replace")


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:stop] for start, stop in pairwise(edges)]


def stream(pieces: list[bytes], stop: tuple[str, ...] = ()) -> tuple[list[str], str | None]:
    """What each push and the finish returned, and the stop string that ended the text."""
    detokenizer = IncrementalDetokenizer(Tokenizer(ByteTokenizer(pieces)), stop)
    parts = [detokenizer.push(token) for token in range(1, len(pieces) + 1)]
    return [*parts, detokenizer.finish()], detokenizer.matched_stop


TEXTS = st.text(alphabet="aé€🙂 b", max_size=40)
CUTS = st.lists(st.integers(0, 1000), max_size=60)


@given(TEXTS, CUTS)
def test_pieces_are_the_text_and_never_half_a_character(text: str, cuts: list[int]) -> None:
    parts, matched = stream(split(text.encode(), cuts))
    assert "".join(parts) == text
    assert matched is None
    assert not any("\ufffd" in part for part in parts)


@given(TEXTS, CUTS)
def test_text_comes_out_as_soon_as_its_characters_are_whole(text: str, cuts: list[int]) -> None:
    pieces = split(text.encode(), cuts)
    parts, _ = stream(pieces)
    sent, given_out = b"", ""
    for piece, part in zip(pieces, parts, strict=False):
        sent, given_out = sent + piece, given_out + part
        whole = sent.decode(errors="ignore")
        if whole.encode() == sent:
            assert given_out == whole


@given(TEXTS, CUTS, st.lists(st.text(alphabet="aé€b ", min_size=1, max_size=4), min_size=1, max_size=3))
def test_the_text_ends_before_the_first_stop_string_wherever_tokens_end(
    text: str, cuts: list[int], stop: list[str]
) -> None:
    parts, matched = stream(split(text.encode(), cuts), tuple(stop))
    ends = [(text.find(each) + len(each), -len(each), each) for each in stop if each in text]
    if ends:
        end, _, expected = min(ends)
        assert "".join(parts) == text[: end - len(expected)]
        assert matched == expected
    else:
        assert "".join(parts) == text
        assert matched is None


def test_what_may_begin_a_stop_string_is_held_until_it_does_not() -> None:
    assert stream([b"one #", b"#", b" two"], ("###",)) == (["one ", "", "## two", ""], None)
    assert stream([b"one #", b"#", b"# two", b"three"], ("###",)) == (["one ", "", "", "", ""], "###")
    assert stream([b"one #"], ("###",)) == (["one ", "#"], None)


def test_unfinished_and_invalid_bytes_become_replacement_characters() -> None:
    assert stream(["🙂".encode()[:2]]) == (["", "\ufffd"], None)
    assert stream([b"\xff", b"a"]) == (["", "\ufffda", ""], None)


def test_special_tokens_have_no_text() -> None:
    detokenizer = IncrementalDetokenizer(Tokenizer(ByteTokenizer([b"a"])))
    assert [detokenizer.push(token) for token in (0, 1, 0, 0, 1)] == ["", "a", "", "", "a"]
    assert detokenizer.finish() == ""


def test_a_model_without_a_chat_template_says_so() -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        Tokenizer(ByteTokenizer([])).encode_chat([{"role": "user", "content": "hi"}])


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=str(tmp_path)):
        Tokenizer.load(tmp_path)
    with pytest.raises(ConfigError, match="is not a directory"):
        Tokenizer.load(tmp_path / "none")


@pytest.fixture(scope="module")
def tokenizer(real_model_dir: Path) -> Tokenizer:
    return Tokenizer.load(real_model_dir)


@pytest.mark.model
@pytest.mark.parametrize("text", ["Grüße, 世界! 🙂🙃 naïve", "  two  spaces\n\n\ttabs", "a b c, it 's . fine", "𓀀𓁐𓂀"])
def test_the_real_tokenizer_streams_what_it_decodes(text: str, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(text)
    detokenizer = IncrementalDetokenizer(tokenizer)
    parts = [detokenizer.push(token) for token in tokens]
    assert "".join([*parts, detokenizer.finish()]) == tokenizer.decode(tokens) == text
    assert not any("\ufffd" in part for part in parts)


@pytest.mark.model
def test_a_chat_ends_where_the_answer_begins(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode_chat([{"role": "user", "content": "What is a cache?"}])
    rendered = tokenizer._tokenizer.decode(tokens)
    assert rendered.endswith("<|im_start|>user\nWhat is a cache?<|im_end|>\n<|im_start|>assistant\n")
    assert rendered.startswith("<|im_start|>system\n")
    assert tokens.count(1) == 3, "the markers are single tokens"
    longer = tokenizer.encode_chat(
        [
            {"role": "user", "content": "What is a cache?"},
            {"role": "assistant", "content": "A store."},
            {"role": "user", "content": "And then?"},
        ]
    )
    assert longer[: len(tokens)] == tokens
