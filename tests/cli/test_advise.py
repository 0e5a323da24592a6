"""``kvtide advise URL``: what it says, when it says nothing, and what it does not fall for."""

import base64
import json
import threading
from typing import Any, BinaryIO

import pytest
from metrics_servers import ROWS, Answer, page, plain, served
from typer.testing import CliRunner, Result

from kvtide.cli import advise_page
from kvtide.cli.main import app


def run(*arguments: object, columns: int = 100) -> Result:
    return CliRunner().invoke(app, ["advise", *map(str, arguments)], env={"COLUMNS": str(columns)})


def asked(answer: Answer | str, *arguments: object, columns: int = 100) -> Result:
    with served(plain(answer) if isinstance(answer, str) else answer) as (address, _):
        return run(address, *arguments, columns=columns)


def on_one_line(result: Result) -> str:
    return " ".join(result.output.split())


def test_it_says_what_there_is_and_what_every_other_size_would_do() -> None:
    result = asked(page(tiers=("host", "disk")))
    assert result.exit_code == 0
    said = on_one_line(result)
    assert "12,031 requests; 25 % of the sessions are followed, their last 10,000 requests judged" in said
    for sentence in (
        "With the host memory there is (4 GiB): 31.2 of 100 prompt tokens are hits, first token p50 1.70 s.",
        "With half the host memory (2 GiB): -6.2 ± 0.6 points of token hits, first token p50 +0.20 s.",
        "With twice the host memory (8 GiB): +9.1 ± 0.8 points of token hits, first token p50 -0.80 s.",
        "Take 8 GiB of host memory: from there on a doubling brings less than 1 point",
        "With twice the disk (400 GiB): +9.1 ± 0.8",
        "Take 400 GiB of disk",
    ):
        assert sentence in said


@pytest.mark.parametrize("columns", [40, 80, 100, 300])
def test_no_line_is_wider_than_the_terminal_or_a_hundred_columns(columns: int) -> None:
    result = asked(page(tiers=("host", "disk")), columns=columns)
    assert max(map(len, result.stdout.splitlines())) <= min(columns, 100)


@pytest.mark.parametrize("path", ["", "/", "/metrics", "/metrics/"])
def test_a_server_is_as_good_as_its_page(path: str) -> None:
    with served(plain(page())) as (address, questions):
        assert run(address + path).exit_code == 0
        assert questions[0].startswith(b"GET /metrics HTTP/1.1")


def test_json_holds_every_figure_and_the_sentences() -> None:
    found: dict[str, Any] = json.loads(asked(page(), "--json").stdout)
    (model,) = found["models"]
    (tier,) = model["tiers"]
    assert (found["ok"], model["judged_requests"], model["sampled_share"]) == (True, 10_000, 0.25)
    assert (tier["tier"], tier["size_bytes"]) == ("host", 4 << 30)
    assert [
        (
            str(one["times"]).removesuffix(".0"),
            one["hit_points"],
            one["gain_points"],
            one["error_points"],
            one["first_token_s"],
        )
        for one in tier["sizes"]
    ] == [pytest.approx(row) for row in ROWS]
    assert [one["verdict"] for one in tier["sizes"]] == ["differs", "now", "differs", "differs"]
    assert tier["advice"]["times"] == 2


def test_engines_of_a_model_are_taken_together_by_what_they_were_asked() -> None:
    other = (("0.5", 10, -2, 0.3), ("1", 12, 0, 0), ("2", 15, 3, 0.3))
    text = page() + page(engine=1, rows=other).replace("1.2e+08", "0.4e+08")
    found = json.loads(asked(text, "--json").stdout)
    assert [one["engines"] for one in found["engines"]] == [["0"], ["1"]]
    (model,) = found["models"]
    sizes = {one["times"]: one for one in model["tiers"][0]["sizes"]}
    assert set(sizes) == {0.5, 1, 2}  # four times is known of one of them alone
    assert sizes[2]["gain_points"] == pytest.approx((3 * 9.1 + 3) / 4, abs=1e-3)
    assert sizes[2]["error_points"] == pytest.approx(((3 * 0.4) ** 2 + 0.3**2) ** 0.5 / 4, abs=1e-3)
    assert sizes[2]["first_token_s"] is None
    assert "2 engines taken together" in on_one_line(asked(text))


def test_before_a_thousand_requests_it_says_how_many_there_were() -> None:
    result = asked(page(rows=(), judged=312))
    assert result.exit_code == 1
    assert "312 of the 1,000 requests an estimate needs" in result.output
    assert json.loads(asked(page(rows=(), judged=312), "--json").stdout)["ok"] is False


def test_a_server_without_ghosts_is_told_from_one_without_kvtide() -> None:
    older = asked('vllm:kvtide_open_jobs{engine="0"} 0\n')
    assert (older.exit_code, "its adviser is not" in older.output) == (1, True)
    for other in ("vllm:num_requests_running 0\n", "", "<html>hello</html>", "\x00\x01"):
        result = asked(other)
        assert (result.exit_code, "has no metrics of kvtide" in result.output) == (2, True)


def test_what_a_stranger_calls_a_model_or_a_tier_does_not_reach_the_terminal_as_it_is() -> None:
    text = page(tiers=("host", "di\x1b[31msk")).replace('"tiny"', '"ti\x1b]0;x\x07ny"')
    result = asked(text)
    assert result.exit_code == 0
    assert not {"\x1b", "\x07"} & set(result.output)


def test_a_name_and_a_password_are_sent_and_never_shown() -> None:
    with served(plain(page())) as (address, questions):
        result = run(address.replace("http://", "http://me:s3%40cret@") + "?token=hidden")
    assert result.exit_code == 0
    assert base64.b64encode(b"me:s3@cret") in questions[0]
    assert questions[0].startswith(b"GET /metrics?token=hidden ")
    assert not any(word in result.output for word in ("s3", "cret", "hidden", "me:"))


def test_whoever_it_is_redirected_to_is_not_told_the_password() -> None:
    with served(plain(page())) as (there, questions):
        answer = plain("", "302 Found", f"Location: {there}/metrics\r\nContent-Length: 0\r\n")
        with served(answer) as (address, first):
            assert run(address.replace("http://", "http://me:s3cret@")).exit_code == 0
    assert b"Authorization" in first[0]
    assert b"Authorization" not in questions[0]


@pytest.mark.parametrize(
    "url",
    [
        "http://me:s3/cret@127.0.0.1:1",
        "http://me:s3cret@127.0.0.1:1",
        "http://me:s3cret@127.0.0.1:99999",
        "http://me:s3#cret@127.0.0.1",
        "me:s3cret@127.0.0.1:8000",
        "ftp://me:s3cret@127.0.0.1",
        "http://me:s3cret@[::1",
        "http://me:s3cret@",
        "http://me:s3 cret@127.0.0.1:1",
        "http://127.0.0.1:1/?token=s3cret",
    ],
)
def test_no_error_shows_a_secret(url: str) -> None:
    for more in ((), ("--json",)):
        result = run(url, "--timeout", "5", *more)
        assert result.exit_code == 2
        assert not any(word in result.output for word in ("s3", "cret"))


@pytest.mark.parametrize("url", ["localhost:8000", "file:///etc/passwd", "8000", "", "http://"])
def test_what_is_no_address_is_refused_with_one_that_would_do(url: str) -> None:
    result = run(url)
    assert result.exit_code == 2
    assert "http://localhost:8000/metrics" in on_one_line(result)


def test_options_that_cannot_be_are_named() -> None:
    for option, value in (("--worth", "0"), ("--worth", "nan"), ("--timeout", "-1"), ("--timeout", "inf")):
        result = run("http://127.0.0.1:1", option, value)
        assert (result.exit_code, f"{option} = " in result.output) == (2, True)
    assert "URL = None" in run().output


@pytest.mark.parametrize(
    ("status", "said"), [("404 Not Found", "404"), ("401 Nope", "401"), ("500 \x1b[31m", "500")]
)
def test_an_answer_that_is_none_is_said(status: str, said: str) -> None:
    result = asked(plain("no", status))
    assert (result.exit_code, f"answers {said}" in result.output) == (2, True)
    assert "\x1b" not in result.output


def test_one_that_never_ends_its_answer_is_given_up() -> None:
    done = threading.Event()

    def in_drops(_: bytes, out: BinaryIO) -> None:
        out.write(b"HTTP/1.1 200 OK\r\n")
        while not done.wait(0.02):
            out.write(b"X-A: b\r\n")

    with served(in_drops) as (address, _):
        result = run(address, "--timeout", "0.3")
        done.set()
    assert (result.exit_code, "no whole answer within 0.3 s" in result.output) == (2, True)


def test_one_that_sends_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advise_page, "MOST_BYTES", 1 << 20)
    result = asked(plain(b"# spam\n" * 300_000))
    assert (result.exit_code, "sends more than 1 MiB" in result.output) == (2, True)


def test_one_that_says_no_http_is_not_reached() -> None:
    for nonsense in (b"", b"\x00\x01\x02\n", b"SSH-2.0-x\r\n"):
        result = asked(lambda _, out, said=nonsense: out.write(said) and None)
        assert (result.exit_code, "URL = 'http://127.0.0.1" in result.output) == (2, True)
