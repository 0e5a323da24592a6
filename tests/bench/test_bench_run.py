"""The frame: registry, command line, files; with a benchmark that is made up and takes no time."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from benchmarks import run
from benchmarks.frame import machine
from benchmarks.frame.bars import at_least
from benchmarks.frame.machine import Bystanders, wait_quiet
from benchmarks.frame.plots import Line, Plot
from benchmarks.frame.registry import Bench, Registry, Sample, UnfitError, Verdict, discover
from benchmarks.frame.results import as_json, judged, judged_again, write
from benchmarks.frame.rounds import rounds, whole_rounds
from typer.testing import CliRunner

runner = CliRunner()


def judge(samples: Sequence[Sample]) -> Verdict:
    if not samples:
        raise UnfitError("no samples")
    ratio = sum(sample["ratio"] for sample in samples) / len(samples)
    plot = Plot("a <picture>", "x", "y", (Line("ratio", [1, 2], [ratio, 1]),), (("bar", 0.5),))
    return Verdict((at_least("mean", ratio, 0.5),), ("a note with <tags>",), (plot,))


def made_up(ratios: Sequence[float] = (0.75, 0.75), error: Exception | None = None) -> Registry:
    registry = Registry()

    @registry.benchmark("made_up", asks="Is it?", about_s=60, judge=judge)
    def measure(bench: Bench) -> list[Sample]:
        bench.progress("measuring", 0, len(ratios))
        if error:
            raise error
        return [{"ratio": ratio} for ratio in ratios]

    return registry


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "wait_quiet", lambda limit_s: True)


def bench(monkeypatch: pytest.MonkeyPatch, registry: Registry, *args: object) -> tuple[int, str]:
    monkeypatch.setattr(run, "discover", lambda: registry)
    result = runner.invoke(run.app, [str(arg) for arg in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout


def test_every_file_is_found_and_registers_its_own_name() -> None:
    folder = Path(run.__file__).parent
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "run"}
    assert {one.name for one in discover().all()} == files >= {"serving"}


def test_all_together_take_a_quarter_of_an_hour() -> None:
    assert sum(one.about_s for one in discover().all()) <= 900


def test_finding_benchmarks_imports_nothing_heavy() -> None:
    program = (
        "import sys; from benchmarks.frame.registry import discover;"
        " names = [one.name for one in discover().all()];"
        " print('serving' in names, sorted({'torch', 'vllm', 'numba'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=run.ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "True []"


def test_two_of_one_name_are_refused() -> None:
    registry = made_up()
    with pytest.raises(ValueError, match="two benchmarks of the name made_up"):
        registry.benchmark("made_up", asks="", about_s=1, judge=judge)


def test_who_is_asked_for_by_name_may_take_longer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    registry, told = Registry(), []

    @registry.benchmark("made_up", asks="Is it?", about_s=60, alone_s=90, judge=judge)
    def measure(bench: Bench) -> list[Sample]:
        told.append(bench.alone)
        return [{"ratio": 1.0}]

    bench(monkeypatch, registry, "--out", tmp_path)
    bench(monkeypatch, registry, "--out", tmp_path, "--only", "made_up")
    assert told == [False, True]
    assert registry.get("made_up").alone_s == 90


def test_list_names_each_and_runs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = bench(monkeypatch, made_up(error=RuntimeError("was run")), "--list")
    assert code == 0
    assert said.split() == ["made_up", "60", "s,", "alone", "60", "s", "Is", "it?"]


def test_an_unknown_name_is_answered_with_those_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, said = bench(monkeypatch, made_up(), "--only", "mode_up", "--out", tmp_path)
    assert (code, said) == (2, "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("ratios", "code"), [((0.75, 0.75), 0), ((0.5, 0.5), 0), ((0.4, 0.5), 1), ((), 2)])
def test_the_exit_code_says_met_missed_or_not_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ratios: Sequence[float], code: int
) -> None:
    assert bench(monkeypatch, made_up(ratios), "--out", tmp_path)[0] == code


@pytest.mark.parametrize("error", [UnfitError("no engine"), ZeroDivisionError("a bug")])
def test_what_could_not_be_measured_is_in_the_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    code, said = bench(monkeypatch, made_up(error=error), "--out", tmp_path)
    assert code == 2
    assert str(error) in said
    assert str(error) in json.loads((tmp_path / "results.json").read_text())["benchmarks"]["made_up"]["unfit"]
    assert str(error) in (tmp_path / "index.html").read_text()


def test_the_results_hold_samples_and_bars(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bench(monkeypatch, made_up(), "--out", tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    bar = {"name": "mean", "ratio": 0.75, "bar": 0.5, "sense": "at least", "met": True}
    assert results["bars"] == [{"benchmark": "made_up", **bar}]
    assert results["benchmarks"]["made_up"]["bars"] == [bar]
    assert results["benchmarks"]["made_up"]["samples"] == [{"ratio": 0.75}, {"ratio": 0.75}]
    assert {"cpu", "cores", "versions", "load_average", "quiet_at_start"} <= set(results["environment"])


def test_json_on_stdout_is_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, said = bench(monkeypatch, made_up(), "--json", "--out", tmp_path)
    assert said == (tmp_path / "results.json").read_text()


def test_the_table_fits_a_hundred_columns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, said = bench(monkeypatch, made_up(), "--out", tmp_path)
    table = said.split(str(tmp_path))[0]
    assert "0.750" in table
    assert max(len(line) for line in table.splitlines()) <= 100


def test_the_page_needs_no_other_file_and_escapes_what_it_shows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench(monkeypatch, made_up(), "--out", tmp_path)
    page = (tmp_path / "index.html").read_text()
    assert 'src="data:image/png;base64,' in page
    assert "a note with &lt;tags&gt;" in page
    assert not any(mark in page for mark in ("<tags>", "<picture>", "http:", "https:"))


def test_changed_samples_in_a_file_change_the_verdict_and_not_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench(monkeypatch, made_up(), "--out", tmp_path)
    file = tmp_path / "results.json"
    assert bench(monkeypatch, made_up(), "--judge", file)[0] == 0
    content = json.loads(file.read_text())
    content["benchmarks"]["made_up"]["samples"][0]["ratio"] = 0.01
    file.write_text(json.dumps(content))
    before = file.read_text()
    code, said = bench(monkeypatch, made_up(), "--judge", file)
    assert code == 1
    assert "0.380" in said
    assert file.read_text() == before


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"environment": {}, "benchmarks": {"x": {}}}'])
def test_a_file_of_somebody_else_is_not_judged(tmp_path: Path, content: str) -> None:
    file = tmp_path / "results.json"
    file.write_text(content)
    with pytest.raises(UnfitError, match=r"not a results\.json of ours"):
        judged_again(file, made_up())


def test_a_result_of_a_benchmark_nobody_knows_is_not_judged(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    write(file, as_json({}, [judged(made_up(), "made_up", "", 1, ({"ratio": 1.0},))]))
    with pytest.raises(UnfitError, match="no benchmark 'made_up'"):
        judged_again(file, Registry())


def test_arms_take_turns_and_the_first_place() -> None:
    assert [order for _, order in rounds("AB", 3)] == [("A", "B"), ("B", "A"), ("A", "B")]
    assert [order[0] for _, order in rounds("ABC", 4)] == ["A", "B", "C", "A"]


def test_rounds_come_in_order_with_every_arm() -> None:
    samples = [{"round": index, "arm": arm} for index in (1, 0) for arm in "BA"]
    assert [(one["A"]["round"], one["B"]["round"]) for one in whole_rounds(samples, "AB")] == [(0, 0), (1, 1)]


def test_what_is_busy_and_not_ours_is_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    before = machine._Reading(at_s=10, busy_s=100, stolen_s=5, own_s=40)
    after = machine._Reading(at_s=12, busy_s=103.5, stolen_s=5.5, own_s=42.5)
    readings = iter((before, after))
    monkeypatch.setattr(machine, "_read", lambda: next(readings))
    with Bystanders() as bystanders:
        pass
    assert (bystanders.others_cores, bystanders.stolen_cores) == (0.5, 0.25)


def test_what_a_child_uses_is_ours() -> None:
    """A grandchild, so that the whole family is looked at."""
    spin = "import time; t = time.process_time\nwhile t() < 0.3: pass\nprint(flush=True); time.sleep(60)"
    launch = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spin!r}])"
    before_s = machine._own_s()
    with subprocess.Popen(
        [sys.executable, "-c", launch], stdout=subprocess.PIPE, start_new_session=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        used_s = machine._own_s() - before_s
        os.killpg(child.pid, signal.SIGKILL)
    assert used_s >= 0.25


def test_waiting_for_quiet_ends_without_it() -> None:
    assert wait_quiet(0, quiet_cores=-1) is False
    assert wait_quiet(0, quiet_cores=1000) is True
