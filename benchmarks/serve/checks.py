"""What every sample has to be, whatever part it is of."""

from benchmarks.frame.registry import Sample, UnfitError
from benchmarks.serve.vocabulary import MIN_ROUNDS

IDLE_CORES = 0.05


def check_idle(sample: Sample) -> None:
    """Refuse a sample whose engine was at work while another one was measured.

    Raises:
        UnfitError: It was.
    """
    if sample["idle_cpu_s"] > IDLE_CORES * sample["idle_s"]:
        raise UnfitError(
            f"{sample['part']}, round {sample['round']}, {sample['arm']}:"
            f" took {sample['idle_cpu_s']:.2f} s while it was not asked"
        )


def quiet_note(what: str, rounds: str, count: int, quiet_count: int) -> str:
    """Say how many rounds count, and whether the figures may be the neighbours'."""
    if quiet_count >= MIN_ROUNDS:
        return f"{what}: {quiet_count} of {count} {rounds} were undisturbed and count"
    return (
        f"NOT A QUIET MACHINE: {what}: only {quiet_count} of {count} {rounds} were undisturbed, so all count;"
        " a missed bar may be the neighbours'"
    )
