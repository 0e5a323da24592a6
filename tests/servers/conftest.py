"""Tests against real servers. One that is skipped has shown nothing: the run is red, but for two by name."""

from collections.abc import Iterator

import pytest

MAY_BE_SKIPPED = {
    "tests/servers/test_objects_radosgw.py": "radosgw is not in every distribution",
    "tests/servers/test_mooncake": "its package and its network namespace cannot be had everywhere",
}
"""By the beginning of a test's name, why."""

_skipped: list[str] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Remember what was skipped, wherever it was."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        _skipped.append(report.nodeid)
    return report


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Remember whole files that were skipped."""
    if report.skipped:
        _skipped.append(report.nodeid)


def unexcused(names: list[str]) -> list[str]:
    """Leave out the tests that may be skipped."""
    return [name for name in names if not name.startswith(tuple(MAY_BE_SKIPPED))]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Make the run red when something else was skipped."""
    if unexcused(_skipped) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say so."""
    for name in unexcused(_skipped):
        terminalreporter.write_line(f"SKIPPED, which is red here: {name}", red=True)
    for name in set(_skipped) - set(unexcused(_skipped)):
        reason = next(why for beginning, why in MAY_BE_SKIPPED.items() if name.startswith(beginning))
        terminalreporter.write_line(f"skipped, as it may be: {name}: {reason}", yellow=True)
