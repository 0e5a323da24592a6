"""How the life of an engine ends: everything is let go, comes to rest, and is found in order.

In stages, since a copy that never ends may be left alone: first all but those, then an idle engine has to
sleep beside them, then those too.
"""

from vllm.v1.request import RequestStatus

from kvtide.jobs import Direction
from kvtide.vllm.testing.asks import Ask
from kvtide.vllm.testing.machine_life import Life
from kvtide.vllm.testing.promises import HangError
from kvtide.vllm.testing.rest import check_rest
from kvtide.vllm.testing.revisit import Revisit

QUARANTINE_S = 200.0
"""After so long an idle engine sleeps, whatever a wedged copy does."""

QUIET = 5
"""Steps in which nothing is left but copies that never end."""

NOBODY = Ask("one token", [1], 1)


def end_well(life: Life) -> None:
    """Let a life end, and check what is left.

    Raises:
        WrongBytesError: A byte was wrong.
        HangError: Something did not end, or ended wrongly.
        LeakError: Something was left over, or is not hit when it is asked again.
    """
    _let_go(life)
    _come_to_rest(life, beside_wedged=True)
    engine = life.engine
    if life.wedged and not engine.scheduler.requests:
        life.happened["rested beside a wedged copy"] += 1
        life.clock.advance(QUARANTINE_S)
        if engine.scheduler.has_requests():
            raise HangError("an idle engine is kept awake by a copy that never ends")
    for copier in life.copiers.values():
        copier.release()
    life.ask(life.next_name, NOBODY)  # wakes an engine that sleeps, so that late answers are heard
    _come_to_rest(life, beside_wedged=False)
    life.check()
    life.check_answers()
    check_rest(engine)
    whole = [ask for name, ask in life.asked.items() if name not in life.aborted and ask is not NOBODY]
    again = Revisit(engine, whole[-1] if whole else NOBODY, lambda: _settle(life), len(life.asked))
    hits = again.run(life.longest_tokens)
    life.happened["hit again"] += hits.hit_tokens > 0
    life.check()
    life.happened["load checked"] += engine.checked_loads


def _let_go(life: Life) -> None:
    """From now on everything goes well, but for copies that are wedged."""
    life.unpause()
    life.engine.answers.late_share = 0.0
    for copier in life.copiers.values():
        copier.let_go()
    for one in life.siblings:
        one.held = False
        one.end(one.open_ids)


def _come_to_rest(life: Life, beside_wedged: bool) -> None:
    """Step until the engine sleeps; with ``beside_wedged``, until nothing but wedged copies is left."""
    engine, quiet = life.engine, 0
    requests = engine.scheduler.requests
    left = sum(life.asked[name].max_tokens + 60 for name in requests)
    for turn in range(2 * left + 400):
        if not engine.busy:
            return
        quiet = quiet + 1 if beside_wedged and life.wedged and not requests else 0
        if quiet > QUIET:
            return
        # Ever longer pauses: nothing waits for ever but what is wedged.
        life.clock.advance(0.005 * (1 + turn / 50))
        life.step()
    waiting = {name: RequestStatus(request.status).name for name, request in requests.items()}
    if beside_wedged and _starved(life, set(waiting.values())):
        life.happened["starved by a wedged load"] += 1
        return
    raise HangError(f"not at rest: requests {waiting}, copies {life.copies()}, books {engine.describe()}")


def _starved(life: Life, statuses: set[str]) -> bool:
    """Whether they may wait: blocks are held for a load that never ends, and nobody awaits a load."""
    pool = life.engine.scheduler.kv_cache_manager.block_pool
    held = pool.get_num_free_blocks() < life.shape.num_blocks - 1
    wedged = any(one.stuck_ids for (_, way), one in life.copiers.items() if way is Direction.LOAD)
    return wedged and held and statuses <= {"WAITING", "PREEMPTED"}


def _settle(life: Life) -> None:
    for _ in range(2000):
        if not life.engine.busy:
            return
        life.step()
    raise HangError(f"not at rest after one request, books {life.engine.describe()}")
