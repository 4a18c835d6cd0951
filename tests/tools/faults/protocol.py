"""What comes on a connection between a client and kvtier-server."""

from __future__ import annotations

from tests.tools.mutation import Mutant

WIRE = "kvtier/protocol/wire.py"
TESTS = "tests/protocol/test_wire.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="a message of any length is read",
        rules=(),
        file=WIRE,
        old="if not 1 <= message_bytes <= self.max_message_bytes:",
        new="if message_bytes < 1:",
        tests=(f"{TESTS}::test_a_message_over_the_cap_is_refused_by_its_header_alone",),
    ),
    Mutant(
        name="a payload of any length is read",
        rules=(),
        file=WIRE,
        old="if payload_bytes > self.max_payload_bytes:",
        new="if payload_bytes > MAX_PAYLOAD_BYTES:",
        tests=(f"{TESTS}::test_a_payload_over_the_cap_is_refused_by_its_header_alone",),
    ),
    Mutant(
        name="a list of a message has no bound",
        rules=(),
        file="kvtier/protocol/fields.py",
        old="Handles = Annotated[list[Handle], Meta(max_length=MAX_BLOCKS)]",
        new="Handles = list[Handle]",
        tests=("tests/protocol/test_messages.py::test_every_field_is_of_a_type_with_a_bound",),
    ),
    Mutant(
        name="a payload that is skipped goes on into its targets",
        rules=(),
        file=WIRE,
        old="        self._skipping = True\n        self._targets = []\n",
        new="        self._skipping = True\n",
        tests=(f"{TESTS}::test_a_payload_under_way_may_be_skipped_and_writes_no_more",),
    ),
    Mutant(
        name="what lies behind a message with a payload is read into memory of the receiver's own",
        rules=(),
        file=WIRE,
        old="if self._message_bytes and (self._payload_bytes or whole > BUFFER_BYTES):",
        new="if self._message_bytes and whole > BUFFER_BYTES:",
        tests=(f"{TESTS}::test_a_header_and_a_message_that_came_alone_leave_nothing_to_be_copied",),
    ),
    Mutant(
        name="a connection that was closed keeps the memory of a slot",
        rules=(),
        file=WIRE,
        old="            self._dead = error\n        self._targets = []\n",
        new="            self._dead = error\n",
        tests=(f"{TESTS}::test_a_closed_receiver_lets_go_of_its_targets",),
    ),
    Mutant(
        name="a token shows where a message is printed",
        rules=(),
        file="kvtier/protocol/messages.py",
        old='token = "..." if self.token else ""',
        new="token = self.token",
        tests=("tests/protocol/test_messages.py::test_a_token_does_not_show",),
    ),
    Mutant(
        name="blocks are published in fewer slots than there are names",
        rules=(),
        file="kvtier/protocol/storing.py",
        old="check_counts(blocks=blocks, reservations=len(self.reservations), checksums=len(self.checksums))",
        new="check_counts(reservations=len(self.reservations), checksums=len(self.checksums))",
        tests=("tests/protocol/test_messages.py::test_what_does_not_agree_with_itself_is_no_message_of_a_client",),
    ),
]
