"""What serving gains: kvtide, vLLM's own connector, and no connector at all.

Real engines with the same settings, each in a process of its own, take turns at the same batches: prompts
that are hits nowhere, and prompts half or nine tenths of which was stored before; short ones with a real
model, and contexts of 32k tokens with a tiny one. Knows in which order parts are measured and how long they
may take; what they consist of is in ``benchmarks.serve``.
"""

from collections.abc import Sequence

from benchmarks.frame.models import model_folder
from benchmarks.frame.registry import Bench, Sample, UnfitError, Verdict, benchmark
from benchmarks.serve.judge_cold import judge_cold
from benchmarks.serve.judge_hits import judge_hits
from benchmarks.serve.runs import cold_session, engines_of, hit_rounds
from benchmarks.serve.tiny import tiny_model
from benchmarks.serve.vocabulary import ARMS, COLD, COLD_ARMS, CONNECTED, LOADS, LONG, WARM

# Where a process's pages lie is a matter of luck that lasts as long as the process: fresh ones are drawn.
SESSIONS, SESSIONS_ALONE = 1, 2
SESSION_PAIRS, SESSION_PAIRS_ALONE = 10, 12

# On a busy machine: then the rounds there are have to do.
SESSION_LIMIT_S, SESSION_LIMIT_ALONE_S = 120.0, 150.0
PART_LIMIT_S, PART_LIMIT_ALONE_S = 150.0, 300.0


def judge(samples: Sequence[Sample]) -> Verdict:
    """Compare the arms, part by part.

    Raises:
        UnfitError: The samples are not of what the bars are about.
    """
    of_part: dict[str, list[Sample]] = {part: [] for part in (COLD, WARM, LONG)}
    for sample in samples:
        if sample["part"] not in of_part:
            raise UnfitError(f"samples of {sample['part']}, which is no part of this benchmark")
        of_part[sample["part"]].append(sample)
    verdicts = [judge_cold(of_part[COLD]), *(judge_hits(part, of_part[part]) for part in (WARM, LONG))]
    return Verdict(
        tuple(bar for verdict in verdicts for bar in verdict.bars),
        tuple(note for verdict in verdicts for note in verdict.notes),
        tuple(plot for verdict in verdicts for plot in verdict.plots),
    )


@benchmark(
    "serving",
    asks="What does serving gain, beside vLLM's own connector and beside none?",
    about_s=318,
    alone_s=790,
    judge=judge,
)
def measure(bench: Bench) -> list[Sample]:
    """Measure one part after the other, each with engines of its own."""
    sessions = SESSIONS_ALONE if bench.alone else SESSIONS
    steps, done = sessions + 2, 0

    def say(text: str) -> None:
        bench.progress(text, done, steps)

    say("the models")
    model = model_folder(bench.model, say)
    tiny = tiny_model(bench.folder / "tiny-model.log", say)
    samples: list[Sample] = []
    for session in range(sessions):
        say(f"session {session + 1}: starting two engines")
        # The same luck for both: who starts first has the emptier machine.
        starting = COLD_ARMS if session % 2 == 0 else COLD_ARMS[::-1]
        pairs = SESSION_PAIRS_ALONE if bench.alone else SESSION_PAIRS
        limit_s = SESSION_LIMIT_ALONE_S if bench.alone else SESSION_LIMIT_S
        with engines_of(COLD, starting, model, bench.folder) as (engines, vocabulary):
            samples += cold_session(engines, vocabulary, session, pairs, limit_s, say)
        done += 1
    for part, folder in ((WARM, model), (LONG, tiny)):
        other = LOADS[part].other_rounds[bench.alone]
        arms = ARMS if other else CONNECTED
        say(f"{part}: starting {len(arms)} engines")
        with engines_of(part, arms, folder, bench.folder) as (engines, vocabulary):
            limit_s = PART_LIMIT_ALONE_S if bench.alone else PART_LIMIT_S
            samples += hit_rounds(part, engines, vocabulary, other, limit_s, say)
        done += 1
    return samples
