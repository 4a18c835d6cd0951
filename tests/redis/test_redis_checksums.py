"""A block whose checksum is known goes to the server with it, whatever lies in its buffer by then."""

from __future__ import annotations

from kvtier.frame import payload_checksum
from kvtier.testing.redis_servers import RedisServer
from kvtier.tiers.base import ReadOutcome, WriteOutcome, WriteRequest
from tests.redis.rig import block_of, get, key_of, opened


def test_what_is_not_what_it_should_be_is_damaged_when_it_is_read(server: RedisServer) -> None:
    right, scribbled, of_another = block_of("right"), block_of("scribbled"), payload_checksum(block_of("right"))
    with opened(server.url) as tier:
        requests = [
            WriteRequest(key_of("right"), None, memoryview(right), checksum=of_another),
            WriteRequest(key_of("scribbled"), None, memoryview(scribbled), checksum=of_another),
        ]
        assert tier.write(requests) == [WriteOutcome.STORED] * 2
        assert get(tier, "right") is ReadOutcome.OK
        assert get(tier, "scribbled") is ReadOutcome.DAMAGED
        assert tier.contains([key_of("scribbled")]) == [False]
