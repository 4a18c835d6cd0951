"""The conversations: each about the manual of one of Python's own modules, real text that every machine has."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtier.errors import ConfigError
from kvtier_engine.sampling import SamplingParams

if TYPE_CHECKING:
    from kvtier_engine.tokenizer import Tokenizer

__all__ = ["ANSWER", "Session", "make_sessions", "manual"]

ANSWER = SamplingParams(max_tokens=16, ignore_eos=True)

MODULES = ("argparse", "logging", "threading", "subprocess", "collections", "random", "typing", "unittest")
QUESTIONS = (
    "What is this module for? Answer in one sentence.",
    "Which class or function of it would you show a beginner first, and why?",
    "What mistake do people make with it most often?",
)


@dataclass(slots=True)
class Session:
    """One user's conversation. messages: what was said so far, in the chat template's form."""

    name: str
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, turn: int) -> None:
        self.messages.append({"role": "user", "content": QUESTIONS[turn]})

    def answer(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})


def make_sessions(count: int, tokenizer: Tokenizer, manual_tokens: int) -> list[Session]:
    """`count` conversations, each opened with `manual_tokens` tokens of a module's manual."""
    if not 1 <= count <= len(MODULES):
        raise ConfigError(f"sessions must lie in 1..{len(MODULES)}, not {count}")
    sessions = []
    for name in MODULES[:count]:
        tokens = tokenizer.encode(manual(name))[:manual_tokens]
        if len(tokens) < manual_tokens:
            raise ConfigError(f"this Python's manual of {name} has {len(tokens)} tokens, fewer than {manual_tokens}")
        text = tokenizer.decode(tokens)
        system = {"role": "system", "content": f"You answer questions about this manual of {name}:\n\n{text}"}
        sessions.append(Session(name, [system]))
    return sessions


def manual(name: str) -> str:
    """The module's docstring, then those of its public classes, functions and methods."""
    module = importlib.import_module(name)
    parts = [inspect.getdoc(module) or ""]
    for member_name in sorted(vars(module)):
        member = vars(module)[member_name]
        if member_name.startswith("_") or not (inspect.isclass(member) or inspect.isfunction(member)):
            continue
        parts.append(f"{member_name}: {inspect.getdoc(member) or ''}")
        if inspect.isclass(member):
            methods = inspect.getmembers(member, inspect.isfunction)
            parts += [f"{member_name}.{key}: {inspect.getdoc(value)}" for key, value in methods if key[0] != "_"]
    return "\n\n".join(parts)
