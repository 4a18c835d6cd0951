"""What `make fuzz` goes on with for minutes, for a moment."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.wire_target import check
from tests.protocol.examples import golden_frames

FRAMES = [data for _, data in golden_frames()]
streams = st.lists(st.sampled_from(FRAMES) | st.binary(max_size=20), max_size=4).map(b"".join)


@given(st.integers(0, 255), streams)
def test_frames_among_bytes_at_random(how: int, stream: bytes) -> None:
    check(bytes((how,)) + stream)


@given(st.integers(0, 255), streams, st.data())
def test_frames_with_a_piece_replaced(how: int, stream: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(stream)))
    end = data.draw(st.integers(at, min(len(stream), at + 4)))
    check(bytes((how,)) + stream[:at] + data.draw(st.binary(max_size=4)) + stream[end:])
