"""What a mutant is; tests/tools/mutant_list.py says how to add one."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Mutant"]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: `old` becomes `new` in `file`, and for each of `rules` one of `tests` that names it must fail."""

    name: str
    rules: tuple[int, ...]
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def source(self, text: str) -> str:
        """The file's text with the fault. Raises ValueError when it is out of date, or is no Python."""
        found = text.count(self.old)
        if found != 1:
            raise ValueError(f"mutant out of date: what it replaces stands {found} times in {self.file}: {self.old!r}")
        mutated = text.replace(self.old, self.new)
        try:
            compile(mutated, self.file, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise ValueError(f"not Python with this mutant: {self.file}: {error}") from error
        return mutated
