"""Text to tokens and back: a model's own tokenizer, and a detokenizer for text that is sent while it is generated."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError

__all__ = ["IncrementalDetokenizer", "Tokenizer"]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """A model directory's tokenizer. Any thread may call it; encoding changes settings inside, so it takes a lock."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()

    @classmethod
    def load(cls, model_dir: Path | str) -> Tokenizer:
        """Load from local files only. Raises ConfigError if there is no usable tokenizer."""
        from transformers import AutoTokenizer

        if not Path(model_dir).is_dir():
            raise ConfigError(f"no tokenizer in {model_dir}: it is not a directory")
        try:
            return cls(AutoTokenizer.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot load the tokenizer in {model_dir}: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Tokens of a plain prompt, with the special tokens that the model puts around one."""
        with self._lock:
            return list(self._tokenizer(text)["input_ids"])

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Tokens of a conversation (`{"role": ..., "content": ...}` each), up to where the assistant's answer begins.

        Raises ConfigError if the model has no chat template, or its template refuses these messages.
        """
        if not self._tokenizer.chat_template:
            raise ConfigError("the model has no chat template; send a plain prompt instead")
        from jinja2.exceptions import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise ConfigError(f"the model's chat template refuses these messages: {error}") from error
        with self._lock:
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`, without special tokens; U+FFFD for bytes that are not UTF-8."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


class IncrementalDetokenizer:
    """One request's text, token by token, in pieces whose concatenation never has to be taken back.

    Holds back the tokens of an unfinished UTF-8 character, and text that may be the beginning of a stop string.
    Used by one thread at a time.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        # Tokens whose text is out, kept because they decide how the next ones are spaced; then tokens not yet text.
        self._context: list[int] = []
        self._pending: list[int] = []
        # Text that may be the beginning of a stop string.
        self._held = ""
        self._matched: str | None = None

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._matched

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that is now certain, up to a stop string. After one, returns ""."""
        if self._matched is not None:
            return ""
        self._pending.append(token_id)
        return self._release(self._take_pending(final=False))

    def finish(self) -> str:
        """The text still held back, once there are no more tokens: unfinished characters become U+FFFD."""
        if self._matched is not None:
            return ""
        text = self._release(self._take_pending(final=True)) + self._held
        self._held = ""
        return text

    def _take_pending(self, *, final: bool) -> str:
        before = self._tokenizer.decode(self._context)
        text = self._tokenizer.decode(self._context + self._pending)
        unfinished = len(text) <= len(before) or text.endswith(_REPLACEMENT)
        if unfinished and not final:
            return ""
        self._context, self._pending = self._pending, []
        return text[len(before) :]

    def _release(self, text: str) -> str:
        """Append `text` to what is held, and return what no stop string can claim any more."""
        text = self._held + text
        found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self._stop if stop in text]
        if found:
            # The one that ends first, so that the outcome does not depend on where tokens begin and end.
            end, _, self._matched = min(found)
            self._held = ""
            return text[: end - len(self._matched)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
