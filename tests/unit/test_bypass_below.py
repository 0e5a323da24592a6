"""A policy below host memory refuses what is worth less; who wants all of a request gets it there, too."""

import pytest
from test_ladder import Books, path

from kvtide.jobs import OffloadPolicy, ReqContext
from kvtide.manager.lower import Demotion
from kvtide.policies import AdaptivePolicy

SKIPPED = "tier_skipped_chunks|disk,bypassed"


class Refusing(AdaptivePolicy):
    """Finds whatever is there worth more than what a visit brings that it was told of."""

    def yields(self, visit: int, position: int) -> bool:
        return visit in self._visits and self.victim() is not None


def full_books(demotion: Demotion) -> Books:
    books = Books(demotion=demotion, capacity=4, policy=Refusing())
    offered(books, ReqContext("first", visit=1), 1, 2, 3, 4)
    assert books.below(path(1, 2, 3, 4)) == 4, "as long as nobody has to leave, all are let in"
    return books


def offered(books: Books, ctx: ReqContext, *tokens: int) -> int:
    """Come with a prompt, store it, and ask for it once more; say how many of its chunks were written on."""
    run = path(*tokens)
    books.host.visited(run, ctx, float(ctx.visit))
    writes = books.store(run, ctx) or books.ladder.catch_up(run, Demotion.SECOND_SIGHT, ctx)
    for write in writes:
        books.end(write)
    return sum(len(write.run) for write in writes)


@pytest.mark.parametrize("demotion", [Demotion.AT_ONCE, Demotion.SECOND_SIGHT])
def test_who_wants_all_of_a_request_is_not_refused_by_a_full_disk(demotion: Demotion) -> None:
    books = full_books(demotion)
    assert offered(books, ReqContext("second", visit=2), 5, 6) == 0
    assert books.metrics.data[SKIPPED] == 2
    assert books.below(path(1, 2, 3, 4)) == 4, "and nobody has left for what was refused"

    whole = ReqContext("third", visit=3, policy=OffloadPolicy.REQUEST_LEVEL)
    assert offered(books, whole, 7, 8, 9) == 3
    assert books.below(path(7, 8, 9)) == 3
    assert books.metrics.data[SKIPPED] == 2
    assert len(books.forgotten()) == 3, "three have left for it"


def test_what_leaves_host_memory_is_nobodys_and_written_on() -> None:
    books = Books(demotion=Demotion.ON_EVICTION, capacity=4, slots=8, policy=Refusing())
    for visit in range(1, 5):
        books.host.visited(path(visit, 3), ReqContext("r", visit=visit), float(visit))
        books.store(path(visit, 3), ReqContext("r", visit=visit))
    saved = books.ladder.save_victims()
    assert [list(write.run) for write in saved] == [list(path(1, 3))]
    books.end(*saved)
    assert books.below(path(1, 3)) == 2
