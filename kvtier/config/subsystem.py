"""What every model of settings is made of, and text that several of them read."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, field_validator

__all__ = ["OptionalText", "Subsystem", "parse_optional"]


class Subsystem(BaseModel):
    """Settings of one subsystem: frozen, and checked when they are made."""

    # Strict: text is read as a number only where it comes from the environment, and true is never 1.
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    @field_validator("*")
    @classmethod
    def _check_integer(cls, value: object) -> object:
        """An integer that numpy, the kernel and Python's own printing can take."""
        if isinstance(value, int) and value.bit_length() > 63:
            raise ValueError("write a number below 2**63")
        return value


def parse_optional(value: object) -> object:
    """Text, in which the word 'none' is none."""
    if value == "":
        raise ValueError("write 'none' for none")
    return None if value == "none" else value


OptionalText = Annotated[str | None, BeforeValidator(parse_optional)]
