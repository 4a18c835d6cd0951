"""What an engine says is to be computed before a request that arrives now."""

from __future__ import annotations

import pytest

from kvtier_engine.testing.rig import EngineRig


@pytest.mark.parametrize(("max_batch_tokens", "backlog"), [(64, 0), (16, 24)])
def test_what_a_step_computes_is_no_backlog_of_whom_it_lets_in_afterwards(max_batch_tokens: int, backlog: int) -> None:
    rig = EngineRig(num_blocks=32, kvtier=False, max_batch_tokens=max_batch_tokens, max_num_seqs=8)
    try:
        for number in range(2):
            rig.add(f"r{number}", [number] * 20)
        scheduler = rig.engine.scheduler
        assert scheduler.demand().work.backlog_tokens == 40
        scheduler.schedule([], copies_in_flight=0)
        assert scheduler.demand().work.backlog_tokens == backlog
    finally:
        rig.close()
