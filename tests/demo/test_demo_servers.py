"""Servers are started with what makes them comparable, and never left behind."""

import os
import sys
import time
from pathlib import Path

import pytest

from kvtide.demo import servers
from kvtide.demo.errors import DemoError
from kvtide.demo.servers import Plan, Servers, command_of, environment_of

HEALTHY = """
import http.server, subprocess, sys, signal
{prelude}
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"fine")
    def log_message(self, *args): pass
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("child", child.pid, flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
STUBBORN = HEALTHY.format(prelude="signal.signal(signal.SIGTERM, signal.SIG_IGN)")


def serve(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(
        servers, "command_of", lambda plan, model, port: [sys.executable, "-c", script, str(port)]
    )
    monkeypatch.setattr(servers, "TERM_LIMIT_S", 0.3)


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def all_end(pids: list[int], limit_s: float = 5.0) -> bool:
    deadline_s = time.monotonic() + limit_s
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return not any(is_alive(pid) for pid in pids)


def children(folder: Path) -> list[int]:
    return [int(log.read_text().split()[1]) for log in folder.glob("*.log")]


@pytest.mark.parametrize("script", [HEALTHY.format(prelude=""), STUBBORN])
def test_no_process_is_left_whatever_happens_inside(
    script: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    serve(monkeypatch, script)
    ready: list[str] = []
    pids: list[int] = []

    def use() -> None:
        with Servers([Plan("one", 8), Plan("two", 8)], tmp_path, tmp_path, ready.append) as running:
            assert running["one"].get("/metrics") == "fine"
            pids.extend(children(tmp_path))
            assert all(is_alive(pid) for pid in pids)
            # Two interpreters each, and not the whole machine.
            assert 1 << 20 < (running["one"].resident_bytes() or 0) < 1 << 30
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        use()
    assert sorted(ready) == ["one", "two"]
    assert len(pids) == 2
    assert all_end(pids)


def test_a_paused_server_does_nothing_until_it_is_awake_and_ends_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    serve(monkeypatch, HEALTHY.format(prelude=""))
    with Servers([Plan("one", 8)], tmp_path, tmp_path, print) as running:
        running["one"].pause()
        with pytest.raises(DemoError, match="timed out"):
            running["one"].get("/health", limit_s=0.2)
        with running["one"].awake():
            assert running["one"].get("/health") == "fine"
        with pytest.raises(DemoError, match="timed out"):
            running["one"].get("/health", limit_s=0.2)
        pids = children(tmp_path)
    assert all_end(pids)


def test_a_server_that_does_not_start_shows_the_end_of_its_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    serve(monkeypatch, "print('no such model'); raise SystemExit(3)")
    with (
        pytest.raises(DemoError, match=r"(?s)one ended while starting \(3\).*no such model"),
        Servers([Plan("one", 8)], tmp_path, tmp_path, print),
    ):
        pass


def test_a_server_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    serve(monkeypatch, "import time; time.sleep(60)")
    monkeypatch.setattr(servers, "START_LIMIT_S", 0.2)
    with (
        pytest.raises(DemoError, match="did not answer within"),
        Servers([Plan("one", 8)], tmp_path, tmp_path, print),
    ):
        pass


def test_the_servers_differ_in_pool_and_connector_only(tmp_path: Path) -> None:
    plain = command_of(Plan("a", 128), tmp_path, 1)
    with_kvtide = command_of(Plan("b", 128, "{}"), tmp_path, 1)
    assert with_kvtide == [*plain, "--kv-transfer-config", "{}"]
    larger = command_of(Plan("c", 256), tmp_path, 1)
    assert sum(ours != theirs for ours, theirs in zip(plain, larger, strict=True)) == 2


def test_settings_of_the_users_shell_do_not_reach_the_servers() -> None:
    environment = environment_of({"KVTIDE_HOST_MEMORY": "1MiB", "PATH": os.defpath}, core_count=2)
    assert "KVTIDE_HOST_MEMORY" not in environment
    assert environment["PATH"] == os.defpath
    assert environment["VLLM_CPU_NUM_OF_RESERVED_CPU"] == "0"
    assert environment_of({}, core_count=4)["VLLM_CPU_NUM_OF_RESERVED_CPU"] == "1"
