"""What a client tells of its requests, for people who ask the server why one was not served."""

from __future__ import annotations

from kvtier.protocol.fields import AnyMessage, RequestName, ShortText, Size, TierCounts, TierNames, check_counts

__all__ = ["Tell"]


class Tell(AnyMessage, tag=16, frozen=True):
    """What was decided of a request: kept for a while, and used for nothing. No answer.

    fate: `admitted`, `recomputed` or `failed`. asked: blocks that were wanted, or given up. tiers, served: how many
    of them are restored from where. reason: why not the others, or empty. tier: that was waited for in vain, or empty,
    for waited_ms of limit_ms.
    """

    request: RequestName
    fate: ShortText
    asked: Size
    tiers: TierNames
    served: TierCounts
    reason: ShortText
    tier: ShortText
    waited_ms: Size
    limit_ms: Size

    def __post_init__(self) -> None:
        check_counts(tiers=len(self.tiers), served=len(self.served))
