"""Bytes for a receiver of messages, chosen by which lines of it they reach: `make fuzz`. Needs atheris.

    python -m tests.fuzz.fuzz_wire [CORPUS] [options of libFuzzer, such as -max_total_time=60]

Begins with the frames that tests/protocol pins, each for either side.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["kvtier.protocol", "tests.fuzz.wire_target"]):
    from tests.fuzz import wire_target

from tests.protocol.examples import golden_frames

HOWS = (0b000, 0b001, 0b100, 0b101, 0b110, 0b111 | 5 << 3)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="kvtier-fuzz-") as seeds:
        frames = [data for _, data in golden_frames()]
        for how in HOWS:
            for number, data in enumerate([*frames, b"".join(frames[:15]), b"".join(frames[15:])]):
                (Path(seeds) / f"{how}-{number}").write_bytes(bytes((how,)) + data)
        found = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
        options = [argument for argument in sys.argv[1:] if argument.startswith("-")]
        atheris.Setup([sys.argv[0], *options, *found, seeds], wire_target.check)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
