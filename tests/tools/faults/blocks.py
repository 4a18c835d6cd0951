"""Blocks and hashes: section B of docs/rules.md."""

from __future__ import annotations

from tests.tools.mutation import Mutant

ADMISSION = "engine_adapter/kvtier_engine/admission.py"
BATCH = "engine_adapter/kvtier_engine/batch.py"
ENGINE = "engine_adapter/kvtier_engine/engine.py"
KEYS = "kvtier/keys.py"
POOL = "engine_adapter/kvtier_engine/block_pool.py"
REQUEST = "engine_adapter/kvtier_engine/request.py"
RESTORING = "connectors/kvtier_connectors/restoring.py"
TABLES = "engine_adapter/kvtier_engine/tables.py"

BLOCK_TESTS = "tests/engine/test_rules_blocks.py"
ENGINE_TESTS = "tests/engine/test_engine.py"
LIFE_TESTS = "tests/engine/test_rules_lifetime.py"
POOL_TESTS = "tests/engine/test_block_pool.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="publish after write: blocks are published before the forward",
        rules=(15,),
        file=TABLES,
        old="        request.block_table += blocks\n        return True\n",
        new=(
            "        request.block_table += blocks\n"
            "        done, request.num_computed = request.num_computed, request.num_computed + num_tokens\n"
            "        self.publish(request)\n"
            "        request.num_computed = done\n"
            "        return True\n"
        ),
        tests=(f"{BLOCK_TESTS}::*_r15_*",),
    ),
    Mutant(
        name="publish after write: a failing forward publishes",
        rules=(16,),
        file=ENGINE,
        old="                return [self._fail(request, why) for request in live]\n",
        new=(
            "                for share in scheduled:\n"
            "                    self.scheduler.confirm(share, None, 0.0)\n"
            "                return [self._fail(request, why) for request in live]\n"
        ),
        tests=(f"{BLOCK_TESTS}::*_r16_*",),
    ),
    Mutant(
        name="purity of probes: asking counts as a refusal",
        rules=(17,),
        file=ADMISSION,
        old="        room = self._pool.num_free - self.ledger.credits(running)\n        return not",
        new=(
            "        request.num_refused += 1\n"
            "        room = self._pool.num_free - self.ledger.credits(running)\n"
            "        return not"
        ),
        tests=(f"{BLOCK_TESTS}::*_r17_*",),
    ),
    Mutant(
        name="purity of probes: a match makes a block recent",
        rules=(17,),
        file=POOL,
        old="            blocks.append(block_id)\n            parent = content.node\n",
        new=(
            "            blocks.append(block_id)\n"
            "            if block_id in self._queue:\n"
            "                self._queue.move_to_end(block_id)\n"
            "            parent = content.node\n"
        ),
        tests=(f"{BLOCK_TESTS}::*_r17_*",),
    ),
    Mutant(
        name="each look at what waits is counted",
        rules=(18,),
        file=RESTORING,
        old="        return self._host.look_up(request, num_local, max_blocks)\n",
        new=(
            "        self._space.count_lookup(max_blocks, 0, MissReason.ABSENT, None)\n"
            "        return self._host.look_up(request, num_local, max_blocks)\n"
        ),
        tests=(f"{BLOCK_TESTS}::test_r18_*",),
    ),
    Mutant(
        name="who leaves unadmitted is counted",
        rules=(18,),
        file=RESTORING,
        old=(
            "            self.arrivals.close(request.arrival)\n            self.decision.end(request.arrival.episode)\n"
        ),
        new=(
            "            self.arrivals.close(request.arrival)\n"
            "            self._space.count_lookup(1, 0, MissReason.ABSENT, None)\n"
            "            self.decision.end(request.arrival.episode)\n"
        ),
        tests=(f"{BLOCK_TESTS}::test_r18_*",),
    ),
    Mutant(
        name="a new block a token early",
        rules=(19,),
        file=TABLES,
        old="        needed = request.blocks_for(request.num_computed + num_tokens) - len(request.block_table)\n",
        new="        needed = request.blocks_for(request.num_computed + num_tokens + 1) - len(request.block_table)\n",
        tests=(f"{BLOCK_TESTS}::*_r19_*",),
    ),
    Mutant(
        name="a preempted request keeps what it had computed",
        rules=(20,),
        file=REQUEST,
        old="        self.num_computed = self.num_published = 0\n        return blocks",
        new="        self.num_published = 0\n        return blocks",
        tests=(f"{BLOCK_TESTS}::*_r20_*",),
    ),
    Mutant(
        name="at least one token: a prompt cached whole is not computed",
        rules=(21,),
        file=REQUEST,
        old="        return (len(self.tokens) - 1) // self.block_tokens\n",
        new="        return len(self.tokens) // self.block_tokens\n",
        tests=(f"{BLOCK_TESTS}::*_r21_*",),
    ),
    Mutant(
        name="a reused block keeps its digest",
        rules=(22,),
        file=POOL,
        old="            self._refs[block_id] = 1\n            self._forget(block_id)\n",
        new="            self._refs[block_id] = 1\n",
        tests=(POOL_TESTS,),
    ),
    Mutant(
        name="a twin is not shared",
        rules=(23,),
        file=POOL,
        old="                return twin\n",
        new="                return block_id\n",
        tests=(POOL_TESTS,),
    ),
    Mutant(
        name="a twin is not referenced",
        rules=(23,),
        file=TABLES,
        old="                self._pool.acquire([block_id])\n",
        new="",
        tests=(f"{BLOCK_TESTS}::*_r23_*",),
    ),
    Mutant(
        name="tokens are not compared",
        rules=(24,),
        file=POOL,
        old=" or content.tokens != tokens_of(index):",
        new=":",
        tests=(f"{BLOCK_TESTS}::*_r24_*",),
    ),
    Mutant(
        name="parents are not compared",
        rules=(24,),
        file=POOL,
        old=" or content.parent != parent or",
        new=" or",
        tests=(f"{BLOCK_TESTS}::*_r24_*",),
    ),
    Mutant(
        name="salts are not told apart",
        rules=(25,),
        file=KEYS,
        old=" + _optional(self.salt)).digest()",
        new=").digest()",
        tests=(f"{ENGINE_TESTS}::test_r25_nothing_*",),
    ),
    Mutant(
        name="namespaces are not told apart",
        rules=(25,),
        file=KEYS,
        old='            self.model.encode("utf-8", "surrogatepass"),\n',
        new="",
        tests=(f"{ENGINE_TESTS}::test_r25_engines_*",),
    ),
    Mutant(
        name="a block that is not full is published",
        rules=(26,),
        file=TABLES,
        old="        full = request.num_computed // self._block_tokens\n",
        new="        full = min(len(request.chain.digests), request.blocks_for(request.num_computed))\n",
        tests=(f"{BLOCK_TESTS}::*_r26_*",),
    ),
    Mutant(
        name="without tokens left a request gets its slot",
        rules=(27,),
        file=BATCH,
        old="            if candidate.is_restore or (may_compute and self._budget):",
        new="            if candidate.is_restore or may_compute:",
        tests=(f"{BLOCK_TESTS}::*_r27_*",),
    ),
    Mutant(
        name="pin: a pinned block is handed out",
        rules=(28, 29, 71, 72),
        file=POOL,
        old="            if not self._pins[block_id]:\n                taken.append(block_id)\n",
        new="            taken.append(block_id)\n",
        tests=(
            f"{BLOCK_TESTS}::*_r28_*",
            f"{BLOCK_TESTS}::*_r29_*",
            f"{LIFE_TESTS}::*_r71_*",
            f"{LIFE_TESTS}::*_r72_*",
        ),
    ),
    Mutant(
        name="a held block counts as free",
        rules=(28,),
        file=POOL,
        old=(
            "                self._num_free -= not self._pins[block_id]\n"
            "                self.queue_version += 1\n"
            "            self._refs[block_id] += 1"
        ),
        new=(
            "                self._num_free -= 1\n"
            "                self.queue_version += 1\n"
            "            self._refs[block_id] += 1"
        ),
        tests=(f"{BLOCK_TESTS}::*_r28_*",),
    ),
    Mutant(
        name="prefixes are reused before their tails",
        rules=(29,),
        file=POOL,
        old="        for block_id in reversed(block_ids):\n",
        new="        for block_id in block_ids:\n",
        tests=(f"{POOL_TESTS}::*_r29_*",),
    ),
]
