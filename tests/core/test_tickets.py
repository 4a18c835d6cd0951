"""Tickets: one answer, whoever is first."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from kvtier.tickets import Ticket


def test_a_ticket_has_no_answer_until_it_is_resolved() -> None:
    ticket: Ticket[int] = Ticket()
    assert (ticket.done, ticket.poll()) == (False, None)
    assert ticket.resolve(3)
    assert (ticket.done, ticket.poll()) == (True, 3)


def test_the_first_answer_stays() -> None:
    ticket = Ticket.resolved("first")
    assert not ticket.resolve("second")
    assert ticket.poll() == "first"


def test_no_answer_may_be_the_answer() -> None:
    ticket: Ticket[None] = Ticket()
    assert ticket.resolve(None)
    assert ticket.done
    assert not ticket.resolve(None)


def test_of_many_threads_one_answers() -> None:
    with ThreadPoolExecutor(8) as threads:
        for _ in range(50):
            ticket: Ticket[int] = Ticket()
            won = list(threads.map(ticket.resolve, range(8)))
            assert won.count(True) == 1
            assert ticket.poll() == won.index(True)
