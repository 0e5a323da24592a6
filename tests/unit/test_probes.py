"""What shared tiers are asked for requests that wait, how long these wait, and what becomes of answers."""

import math

import pytest
from fakes import FakeRequest
from probed import GROUP, EnginePool, Half, ScriptedProber, chunks_of, promoted

from kvtide.config import KVTideConfig
from kvtide.geometry import GroupGeometry, GroupKind
from kvtide.jobs import HopResult, PartFate
from kvtide.keys import LEAD_ALIGNMENT
from kvtide.manager.shared import CONFIRMED_FOR_S

WAIT_S = KVTideConfig.model_fields["probe_wait_s"].default
DONE, FAILED, GONE = PartFate.DONE, PartFate.FAILED, PartFate.GONE
PROMPT = tuple(range(17))
"""Four chunks, and the token that is always computed."""

WINDOW = GroupGeometry(1, GroupKind.SLIDING_WINDOW, 4, 1, 4, window_tokens=9)


def tokens_of(chunks: int, first: int = 0) -> list[int]:
    return list(range(first, first + 4 * chunks + 1))


# -- what is asked -----------------------------------------------------------------------------------------


def test_a_request_that_arrives_asks_for_what_it_can_use_once() -> None:
    half = Half()
    request = half.arrive("a", PROMPT)
    (question,) = half.prober.asked
    assert (question.tier, chunks_of(question)) == (1, [(0, 0, 4)])
    (part,) = question.parts
    assert (part.tokens_per_chunk, part.in_a_row) == (4, True)
    assert part.chunks.hashes == tuple(request.block_hashes[:4])
    assert (part.chunks.parent_hash, part.chunks.lead) == (None, ())
    for _ in range(3):
        half.asks(request)
        half.step()
    assert len(half.prober.asked) == 1
    assert half.count("tier_probes") == 1


def test_every_shared_tier_in_service_is_asked_by_its_own_index_and_no_private_one() -> None:
    half = Half("psss")
    half.serve(3, serves=False)
    half.arrive("a", PROMPT)
    assert [question.tier for question in half.prober.asked] == [2, 4]
    assert len({question.question_id for question in half.prober.asked}) == 2


def test_what_was_confirmed_lately_is_not_asked_for_again_and_the_rest_is_with_its_lead() -> None:
    half, chunks = Half(), LEAD_ALIGNMENT + 10
    half.arrive("a", tokens_of(chunks))
    half.prober.end(half.prober.asked[0], *(True,) * (LEAD_ALIGNMENT + 3))
    half.step()
    request = half.arrive("b", tokens_of(chunks))
    (part,) = half.prober.asked[1].parts
    assert chunks_of(half.prober.asked[1]) == [(0, LEAD_ALIGNMENT + 3, chunks)]
    hashes = request.block_hashes
    assert part.chunks.lead == tuple(hashes[LEAD_ALIGNMENT : LEAD_ALIGNMENT + 3])
    assert part.chunks.parent_hash == hashes[LEAD_ALIGNMENT + 2]


def test_when_all_was_confirmed_lately_nothing_is_asked_and_nobody_waits_for_answers() -> None:
    half = Half()
    half.arrive("a", PROMPT)
    half.prober.end(half.prober.asked[0], *(True,) * 4)
    half.step()
    half.arrive("b", PROMPT)
    assert len(half.prober.asked) == 1
    assert half.open_count == 0


def test_a_hint_is_asked_for_again_when_it_is_old() -> None:
    half = Half()
    half.arrive("a", PROMPT)
    half.prober.end(half.prober.asked[0], *(True,) * 4)
    half.step()
    half.step(CONFIRMED_FOR_S + 1.0)
    half.arrive("b", PROMPT)
    assert chunks_of(half.prober.asked[1]) == [(0, 0, 4)]
    half.prober.end(half.prober.asked[1], *(True,) * 4)
    half.step(1.0)
    half.arrive("c", PROMPT)
    assert len(half.prober.asked) == 2


def test_a_hint_that_grew_old_while_the_engine_slept_is_read_and_the_read_decides() -> None:
    half = Half()
    first = half.arrive("a", PROMPT)
    half.prober.end(half.prober.asked[0], *(True,) * 4)
    half.step()
    half.finish(first)
    late = half.arrive("b", PROMPT)  # nobody has told what time it is
    assert half.asks(late, after_s=3600.0) is None
    (job,) = half.step().jobs
    half.end(job, DONE, DONE, GONE, GONE)
    assert half.asks(late) == 8
    half.arrive("c", PROMPT)
    assert chunks_of(half.prober.asked[-1]) == [(0, 0, 4)], "what was read was not confirmed by asking"


@pytest.mark.parametrize(
    "fields",
    [
        {"skip_reading_prefix_cache": True},
        {"lora_request": object()},
        {"kv_transfer_params": {"no_read": True}},
        {"kv_transfer_params": {"max_load_tokens": 3}},
    ],
    ids=["reads nothing", "an adapter's", "may not read", "may read less than a chunk"],
)
def test_who_may_be_brought_nothing_asks_nothing(fields: dict) -> None:
    half = Half()
    half.arrive("a", PROMPT, **fields)
    assert half.prober.asked == []


def test_no_more_is_asked_for_than_may_be_read() -> None:
    half = Half()
    half.arrive("a", PROMPT, kv_transfer_params={"max_load_tokens": 9})
    assert chunks_of(half.prober.asked[0]) == [(0, 0, 2)]
    half.arrive("b", range(4))
    assert len(half.prober.asked) == 1, "its last token is always computed: less than a chunk is left"


@pytest.mark.parametrize(("held", "asks"), [(4, False), (3, True)])
def test_of_what_host_memory_has_all_nothing_is_asked(held: int, asks: bool) -> None:
    half = Half()
    half.hold(FakeRequest("x", list(PROMPT)), held)
    half.arrive("a", PROMPT)
    assert bool(half.prober.asked) is asks


def test_of_what_the_engine_has_itself_nothing_is_asked() -> None:
    half = Half()
    request = FakeRequest("a", list(PROMPT))
    half.scheduler.bind_block_pool(EnginePool(request.block_hashes[:4]))
    half.arrive("a", PROMPT)
    assert half.prober.asked == []
    half.scheduler.bind_block_pool(EnginePool(request.block_hashes[:3]))
    half.arrive("b", PROMPT)
    assert len(half.prober.asked) == 1


@pytest.mark.parametrize(("serves", "asked"), [(True, 0), (False, 1)])
def test_of_what_a_private_tier_has_nothing_is_asked_while_it_serves(serves: bool, asked: int) -> None:
    half = Half("ps")
    half.hold(FakeRequest("x", list(PROMPT)), 4, tiers=(1,))
    assert half.below(FakeRequest("x", list(PROMPT))) == 4
    half.serve(1, serves)
    half.arrive("a", PROMPT)
    assert len(half.prober.asked) == asked


def test_behind_a_window_full_attention_is_asked_for_first_and_each_group_by_its_own_chunks() -> None:
    wide = GroupGeometry(0, GroupKind.SLIDING_WINDOW, 4, 1, 4, window_tokens=9)
    full = GroupGeometry(1, GroupKind.FULL_ATTENTION, 8, 1, 4)
    half = Half(groups=(wide, full))
    half.arrive("a", PROMPT)
    (question,) = half.prober.asked
    assert chunks_of(question) == [(1, 0, 2), (0, 0, 4)]
    assert [(part.tokens_per_chunk, part.in_a_row) for part in question.parts] == [(8, True), (4, False)]
    half.prober.say(question, True, True)
    half.prober.say(question, False, False, True, True, part=1)
    half.prober.end(question)
    half.step()
    # The point after 16 tokens takes both long chunks, and of the window of 9 the last two.
    assert half.ladder.restore_point(full.run(FakeRequest("x", list(PROMPT)).block_hashes, 0, 2)) == 2


def test_a_window_of_which_all_is_known_is_not_asked_for_with_the_rest() -> None:
    half = Half(groups=(GROUP, WINDOW))
    half.arrive("a", PROMPT)
    half.prober.say(half.prober.asked[0], True, True)
    half.prober.say(half.prober.asked[0], True, True, True, True, part=1)
    half.prober.end(half.prober.asked[0])
    half.step()
    half.arrive("b", PROMPT)
    assert chunks_of(half.prober.asked[1]) == [(0, 2, 4)]


# -- how long is waited --------------------------------------------------------------------------------------


def test_held_until_the_answer_and_then_brought_what_is_there() -> None:
    half = Half()
    request = half.arrive("a", PROMPT)
    assert half.asks(request) is None
    half.prober.end(half.prober.asked[0], True, True, True, False)
    assert half.asks(request, after_s=0.01) is None, "it is being brought now"
    (job,) = (step := half.step()).jobs
    assert promoted(step) == [(1, 0, 3)]
    half.end(job, DONE, DONE, DONE)
    assert half.asks(request) == 12
    assert (half.count("tier_probed_chunks", "s1,there"), half.count("tier_probed_chunks", "s1,absent")) == (
        3,
        1,
    )
    assert half.count("tier_probes_late") == 0


def test_nothing_there_and_it_goes_on_at_once() -> None:
    half = Half()
    request = half.arrive("a", PROMPT)
    assert half.asks(request) is None
    half.prober.end(half.prober.asked[0], False)
    assert half.asks(request) == 0
    assert half.open_count == 0


def test_answered_by_nothing_it_goes_on_at_once() -> None:
    half = Half()
    request = half.arrive("a", PROMPT)
    half.prober.end(half.prober.asked[0])
    assert half.asks(request) == 0


def test_never_answered_it_is_held_for_so_long_from_its_first_turn_and_no_longer() -> None:
    half = Half()
    request = half.arrive("a", PROMPT)
    assert half.asks(request, after_s=5.0) is None, "the engine had no time for it before"
    assert half.asks(request, after_s=WAIT_S - 0.01) is None
    assert half.asks(request, after_s=0.011) == 0
    assert half.prober.forgotten == [half.prober.asked[0].question_id]
    assert half.count("tier_probes_late") == 1
    for _ in range(3):
        assert half.asks(request, after_s=1.0) == 0, "it does not begin to wait again"
    assert half.count("tier_probes_late") == 1


def test_what_is_answered_too_late_is_of_use_to_others_and_to_who_waits_on() -> None:
    half = Half()
    request = half.arrive("a", PROMPT)
    assert half.asks(request) is None
    assert half.asks(request, after_s=2 * WAIT_S) == 0
    half.prober.end(half.prober.asked[0], True, True, True, True)
    assert half.asks(request) is None, "it has no blocks yet, and there is something to bring"
    assert half.below(request) == 4


@pytest.mark.parametrize("expected_s", [WAIT_S * 1.01, math.inf])
def test_for_a_tier_that_has_been_slower_nobody_is_held_but_it_is_asked(expected_s: float) -> None:
    half = Half()
    half.prober.expected_s[1] = expected_s
    request = half.arrive("a", PROMPT)
    assert len(half.prober.asked) == 1
    assert half.asks(request) == 0
    assert half.prober.forgotten == []
    half.prober.end(half.prober.asked[0], True, True, True, True)
    half.step()
    assert half.below(request) == 4


def test_one_who_is_held_goes_on_when_the_tier_turns_out_to_be_stuck() -> None:
    half = Half()
    request = half.arrive("a", PROMPT)
    assert half.asks(request) is None
    half.prober.expected_s[1] = math.inf
    assert half.asks(request, after_s=0.001) == 0


def test_of_two_tiers_the_fast_one_is_waited_for_and_the_slow_one_is_not() -> None:
    half = Half("ss")
    half.prober.expected_s[1] = math.inf
    request = half.arrive("a", PROMPT)
    slow, fast = half.prober.asked
    assert (slow.tier, fast.tier) == (1, 2)
    assert half.asks(request) is None
    half.prober.end(fast, False)
    assert half.asks(request) == 0
    half.prober.end(slow, True, True)
    half.step()
    assert (half.below(request, 1), half.below(request, 2)) == (2, 0)


def test_two_tiers_share_one_wait() -> None:
    half = Half("ss")
    request = half.arrive("a", PROMPT)
    assert half.asks(request) is None
    half.prober.end(half.prober.asked[0], False)
    assert half.asks(request, after_s=WAIT_S - 0.001) is None
    assert half.asks(request, after_s=0.002) == 0
    assert (half.count("tier_probes_late"), half.count("tier_probes_late", "s2")) == (0, 1)


def test_others_are_not_held_for_what_one_has_asked() -> None:
    half = Half()
    half.arrive("a", PROMPT)
    other = half.arrive("b", range(3))
    assert half.asks(other) == 0


# -- a prompt in many answers --------------------------------------------------------------------------------


def test_what_comes_in_many_answers_is_all_brought_however_many_looks_that_takes() -> None:
    half = Half(promotion_share=1.0)
    request = half.arrive("a", tokens_of(200))
    (question,) = half.prober.asked
    brought: list[tuple[int, int, int]] = []
    for start in range(0, 200, 25):
        half.prober.say(question, *(True,) * 25, start=start)
        assert half.asks(request, after_s=0.001) is None
        step = half.step()
        brought += promoted(step)
        for job in step.jobs:
            half.end(job)
    half.prober.end(question)
    assert half.asks(request) == 800
    assert [start for _, start, _ in brought] == [0, *(stop for _, _, stop in brought[:-1])], (
        "each once, in order"
    )
    assert brought[-1][2] == 200


def test_what_fails_whenever_it_is_read_is_given_up() -> None:
    half = Half()
    request = half.arrive("a", PROMPT)
    half.prober.end(half.prober.asked[0], *(True,) * 4)
    begun = 0
    for _ in range(10):
        half.asks(request, after_s=0.001)
        for job in half.step().jobs:
            begun += 1
            half.end(job, FAILED, FAILED, FAILED, FAILED)
    assert 1 < begun <= 3
    assert half.asks(request) == 0


# -- hints that are wrong ------------------------------------------------------------------------------------


def test_a_hint_that_is_refuted_by_asking_is_lost() -> None:
    half = Half()
    half.arrive("a", PROMPT)
    half.prober.end(half.prober.asked[0], *(True,) * 4)
    half.step(CONFIRMED_FOR_S + 1.0)
    half.step(CONFIRMED_FOR_S + 1.0)
    request = half.arrive("b", PROMPT)
    half.prober.end(half.prober.asked[1], True, False, False, False)
    half.step()
    assert half.below(request) == 1
    assert half.count("tier_lost_chunks") == 3
    assert half.step().discards == ()


def test_a_hint_that_is_refuted_by_a_read_is_lost_and_the_request_computes() -> None:
    half = Half()
    request = half.arrive("a", PROMPT)
    half.prober.end(half.prober.asked[0], *(True,) * 4)
    assert half.asks(request) is None
    (job,) = half.step().jobs
    half.end(job, DONE, GONE, GONE, GONE)
    assert half.asks(request) == 4
    assert half.below(request) == 1
    assert half.step().discards == ()


@pytest.mark.parametrize("present", [True, False])
def test_what_is_being_written_while_the_answer_comes_stays_as_it_is(present: bool) -> None:
    half = Half()
    request = half.arrive("a", PROMPT)
    half.prober.end(half.prober.asked[0], False)
    assert half.asks(request) == 0
    half.scheduler.update_state_after_alloc(request, ([1, 2, 3, 4, 5],), 0, half.now_s)
    (job,) = half.step(a=17).jobs
    half.report(results={(job.job_id, 0): {0: HopResult.DONE}})
    # Host memory has four, of which it is not known whether they are there; the fifth others may have.
    longer = half.arrive("b", tokens_of(5))
    question = half.prober.asked[-1]
    assert chunks_of(question) == [(0, 0, 5)]
    half.prober.end(question, *(present,) * 5)
    half.step()
    assert half.below(longer) == 0
    half.report(results={(job.job_id, 1): {0: HopResult.DONE}})
    assert half.below(longer) == (5 if present else 4)
    assert half.count("tier_lost_chunks") == 0
    half.arrive("c", tokens_of(5))
    assert chunks_of(half.prober.asked[-1]) == [(0, 0, 5)], "what we wrote nobody has confirmed"


# -- answers nobody expects ----------------------------------------------------------------------------------


def test_answers_to_what_was_never_asked_or_is_answered_change_nothing() -> None:
    half = Half()
    request = half.arrive("a", PROMPT)
    (question,) = half.prober.asked
    half.prober.end(question, True, True)
    half.prober.end(question, False, False)
    half.step()
    assert half.below(request) == 2, "after the last answer there is none"
    half.prober.end(type(question)(999, 1, question.parts), True, True, True, True)
    half.step()
    assert half.below(request) == 2


@pytest.mark.parametrize(
    ("part", "start", "count", "known"),
    [(0, 0, 9, 4), (0, 4, 2, 0), (0, 40, 100, 0), (1, 0, 4, 0), (0, 2, 100, 0)],
    ids=["longer", "behind the end", "far behind the end", "of no part", "in the middle, and longer"],
)
def test_an_answer_that_goes_further_than_the_question_is_cut(
    part: int, start: int, count: int, known: int
) -> None:
    half = Half()
    request = half.arrive("a", PROMPT)
    half.prober.say(half.prober.asked[0], *(True,) * count, part=part, start=start)
    half.prober.end(half.prober.asked[0])
    half.step()
    assert half.below(request) == known
    assert half.asks(request) in (0, None)
    counted = half.count("tier_probed_chunks", "s1,there")
    assert counted <= 4


def test_an_answer_of_before_what_was_asked_for_is_left_aside() -> None:
    half = Half()
    half.arrive("a", PROMPT)
    half.prober.end(half.prober.asked[0], True, True)
    half.step()
    request = half.arrive("b", PROMPT)
    assert chunks_of(half.prober.asked[1]) == [(0, 2, 4)]
    half.prober.say(half.prober.asked[1], False, False, False, start=0)
    half.prober.end(half.prober.asked[1])
    half.step()
    assert half.below(request) == 2


# -- who goes while it is asked ------------------------------------------------------------------------------


def test_who_has_gone_is_asked_for_no_further_and_what_is_answered_serves_others() -> None:
    half = Half()
    request = half.arrive("a", PROMPT)
    half.finish(request)
    assert half.prober.forgotten == [half.prober.asked[0].question_id]
    half.prober.end(half.prober.asked[0], True, True, True, True)
    half.step()
    assert (half.open_count, half.below(request)) == (0, 4)
    again = half.arrive("b", PROMPT)
    assert len(half.prober.asked) == 1
    assert half.asks(again) is None
    assert promoted(half.step()) == [(1, 0, 4)]


def test_who_is_admitted_is_asked_for_no_further() -> None:
    half = Half()
    half.prober.expected_s[1] = math.inf
    request = half.arrive("a", PROMPT)
    assert half.asks(request) == 0
    half.scheduler.update_state_after_alloc(request, ([1, 2, 3, 4, 5],), 0, half.now_s)
    half.scheduler.check_invariants()
    assert half.prober.forgotten == [half.prober.asked[0].question_id]


def test_the_prompt_that_was_asked_about_is_the_one_of_then() -> None:
    half = Half()
    request = half.arrive("a", PROMPT)
    name = FakeRequest("x", list(PROMPT))
    request.block_hashes.clear()  # the engine has taken back what a session had
    half.prober.end(half.prober.asked[0], True, True, True, True)
    half.step()
    assert half.below(name) == 4


# -- resets --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keeps", [True, False])
def test_what_was_asked_before_a_reset_is_forgotten_and_its_answer_is_nothing(keeps: bool) -> None:
    half = Half(reset_keeps_tiers=keeps)
    request = half.arrive("a", PROMPT)
    assert half.asks(request) is None
    half.scheduler.reset_cache()
    half.scheduler.check_invariants()
    assert half.prober.forgotten == [half.prober.asked[0].question_id]
    half.prober.end(half.prober.asked[0], True, True, True, True)
    assert half.asks(request) == 0
    half.step()
    assert (half.below(request), half.open_count) == (0, 0)


@pytest.mark.parametrize(("keeps", "asked"), [(True, 2), (False, 1)])
def test_after_a_reset_others_are_of_use_only_if_tiers_keep_what_they_hold(keeps: bool, asked: int) -> None:
    half = Half(reset_keeps_tiers=keeps)
    first = half.arrive("a", PROMPT)
    half.prober.end(half.prober.asked[0], *(True,) * 4)
    half.step()
    half.scheduler.reset_cache()
    half.step()
    assert half.below(first) == 0
    half.arrive("b", PROMPT)
    assert len(half.prober.asked) == asked
    half.scheduler.reset_cache()
    half.arrive("c", PROMPT)
    assert len(half.prober.asked) == asked + (1 if keeps else 0)


# -- limits --------------------------------------------------------------------------------------------------


def test_more_names_than_the_books_may_have_are_let_go_of_and_the_newest_are_kept() -> None:
    half = Half(names=40)
    requests: list[FakeRequest] = []
    for number in range(8):
        requests.append(half.arrive(str(number), tokens_of(10, first=1000 * number)))
        half.prober.end(half.prober.asked[-1], *(True,) * 10)
        half.step()
    tier = half.tiers[0]
    assert tier.used_bytes <= tier.capacity_bytes == 40
    assert half.below(requests[-1]) == 10
    assert half.below(requests[0]) == 0
    assert half.step().discards == ()


def test_an_engine_is_awake_until_shared_tiers_are_reached_but_not_for_ever() -> None:
    half = Half()
    half.prober.expected_s[1] = math.inf
    half.step()
    assert half.scheduler.has_pending_push_work(half.now_s)
    half.prober.expected_s[1] = 0.001
    assert not half.scheduler.has_pending_push_work(half.now_s)
    half.prober.expected_s[1] = math.inf
    assert not half.scheduler.has_pending_push_work(half.now_s + 60.0)


def test_at_the_end_nothing_is_asked_any_more() -> None:
    half = Half()
    assert isinstance(half.prober, ScriptedProber)
    half.scheduler.close()
    assert half.prober.closed


def test_without_anybody_to_ask_a_shared_tier_serves_what_was_written_to_it() -> None:
    half = Half(is_asked=False)
    half.hold(FakeRequest("x", list(PROMPT)), 4, tiers=(1,))
    request = half.arrive("a", PROMPT)
    assert half.asks(request) is None
    assert promoted(half.step()) == [(1, 0, 4)]
