"""How much memory may be used: made-up /proc and /sys trees, and what is refused."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ByteSize, TypeAdapter

from kvtide.errors import ConfigError
from kvtide.transfer.memory import Binding, MemoryLimit, available_host_bytes, check_budget, humanised

GIB = 1 << 30
MIB = 1 << 20
UNLIMITED_V1 = 9223372036854771712
V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"


def machine(root: Path, cgroup: str | None, total_gib: int = 64, available_gib: int = 60) -> None:
    sizes = f"MemTotal: {total_gib << 20} kB\nMemFree: 1 kB\nMemAvailable: {available_gib << 20} kB"
    write(root, "proc/meminfo", f"{sizes}\nHugePages_Total: 0")
    if cgroup is not None:
        write(root, "proc/self/cgroup", cgroup)


def write(root: Path, name: str, text: str | int) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(f"{text}".strip() + "\n")


def v2(root: Path, path: str, limit: str | int, used: int, cache: int = 0, high: str | int = "max") -> None:
    write(root, f"{V2}{path}/memory.max", limit)
    write(root, f"{V2}{path}/memory.high", high)
    write(root, f"{V2}{path}/memory.current", used)
    # What is locked or shared counts as file cache too, but gives way to nobody.
    write(
        root,
        f"{V2}{path}/memory.stat",
        f"anon 1\nfile {used}\ninactive_file {cache}\nactive_file 0\nshmem 5",
    )


def v1(root: Path, path: str, limit: int, used: int, cache: int = 0) -> None:
    write(root, f"{V1}{path}/memory.limit_in_bytes", limit)
    write(root, f"{V1}{path}/memory.usage_in_bytes", used)
    # Without total_ the numbers leave out the cgroups below.
    write(
        root,
        f"{V1}{path}/memory.stat",
        f"inactive_file 1\ntotal_inactive_file {cache // 2}\ntotal_active_file {cache - cache // 2}",
    )


def test_without_a_container_the_machine_binds(tmp_path: Path) -> None:
    machine(tmp_path, "0::/\n")
    assert available_host_bytes(tmp_path) == MemoryLimit(60 * GIB, 64 * GIB, Binding.MACHINE)


def test_without_cgroups_the_machine_binds(tmp_path: Path) -> None:
    machine(tmp_path, None)
    assert available_host_bytes(tmp_path).binding is Binding.MACHINE


def test_a_v2_limit_counts_what_is_used_and_not_the_file_cache(tmp_path: Path) -> None:
    machine(tmp_path, "0::/\n")
    v2(tmp_path, "", limit=8 * GIB, used=3 * GIB, cache=1 * GIB)
    assert available_host_bytes(tmp_path) == MemoryLimit(6 * GIB, 8 * GIB, Binding.CONTAINER)


def test_the_tightest_v2_limit_on_the_way_up_binds_wherever_it_is(tmp_path: Path) -> None:
    machine(tmp_path, "0::/kubepods/pod1/box\n")
    v2(tmp_path, "/kubepods/pod1/box", limit="max", used=1 * GIB)
    v2(tmp_path, "/kubepods/pod1", limit=10 * GIB, used=8 * GIB)
    v2(tmp_path, "/kubepods", limit=32 * GIB, used=9 * GIB)
    assert available_host_bytes(tmp_path) == MemoryLimit(2 * GIB, 10 * GIB, Binding.CONTAINER)
    v2(tmp_path, "/kubepods/pod1/box", limit=2 * GIB, used=1 * GIB)
    assert available_host_bytes(tmp_path) == MemoryLimit(1 * GIB, 2 * GIB, Binding.CONTAINER)


def test_a_neighbour_s_limit_is_not_ours(tmp_path: Path) -> None:
    machine(tmp_path, "0::/mine\n")
    v2(tmp_path, "/mine", limit=20 * GIB, used=0)
    v2(tmp_path, "/theirs", limit=1 * GIB, used=0)
    assert available_host_bytes(tmp_path).bytes == 20 * GIB


def test_memory_high_binds_as_well(tmp_path: Path) -> None:
    machine(tmp_path, "0::/\n")
    v2(tmp_path, "", limit=8 * GIB, used=1 * GIB, high=5 * GIB)
    assert available_host_bytes(tmp_path) == MemoryLimit(4 * GIB, 5 * GIB, Binding.CONTAINER)


def test_a_v1_limit_is_found_and_its_cache_counts_the_cgroups_below(tmp_path: Path) -> None:
    machine(tmp_path, "9:name=systemd:/\n4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n")
    v1(tmp_path, "/docker/abc", limit=4 * GIB, used=3 * GIB, cache=1 * GIB)
    v1(tmp_path, "", limit=UNLIMITED_V1, used=30 * GIB)
    assert available_host_bytes(tmp_path) == MemoryLimit(2 * GIB, 4 * GIB, Binding.CONTAINER)


def test_v1_without_a_limit_does_not_bind(tmp_path: Path) -> None:
    machine(tmp_path, "4:memory:/docker/abc\n0::/\n")
    v1(tmp_path, "/docker/abc", limit=UNLIMITED_V1, used=3 * GIB)
    assert available_host_bytes(tmp_path).binding is Binding.MACHINE


@pytest.mark.parametrize("path", ["/docker/0123", "/../../system.slice/box"])
def test_a_path_as_the_host_names_it_falls_back_to_what_is_mounted_here(tmp_path: Path, path: str) -> None:
    machine(tmp_path, f"4:memory:{path}\n")
    v1(tmp_path, "", limit=4 * GIB, used=1 * GIB)
    assert available_host_bytes(tmp_path) == MemoryLimit(3 * GIB, 4 * GIB, Binding.CONTAINER)


def test_both_versions_mounted_the_tighter_binds(tmp_path: Path) -> None:
    machine(tmp_path, "4:memory:/box\n0::/box\n")
    v1(tmp_path, "/box", limit=4 * GIB, used=0)
    write(tmp_path, "sys/fs/cgroup/unified/box/memory.max", 2 * GIB)
    write(tmp_path, "sys/fs/cgroup/unified/box/memory.current", 0)
    assert available_host_bytes(tmp_path).bytes == 2 * GIB


def test_a_container_larger_than_the_machine_does_not_bind(tmp_path: Path) -> None:
    machine(tmp_path, "0::/\n", total_gib=16, available_gib=10)
    v2(tmp_path, "", limit=32 * GIB, used=1 * GIB)
    assert available_host_bytes(tmp_path) == MemoryLimit(10 * GIB, 16 * GIB, Binding.MACHINE)


def test_used_beyond_the_limit_leaves_nothing_rather_than_less(tmp_path: Path) -> None:
    machine(tmp_path, "0::/\n")
    v2(tmp_path, "", limit=1 * GIB, used=1 * GIB + 4096)
    assert available_host_bytes(tmp_path).bytes == 0


def test_where_nobody_can_tell_it_is_said(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="meminfo"):
        available_host_bytes(tmp_path)


def test_this_very_machine_has_memory() -> None:
    limit = available_host_bytes()
    assert 0 < limit.bytes <= limit.total_bytes


CONTAINER = MemoryLimit(6 * GIB, 8 * GIB, Binding.CONTAINER)


def test_a_budget_that_fits_to_the_byte_is_taken() -> None:
    check_budget(6 * GIB, 0, CONTAINER)
    check_budget(5 * GIB, 1 * GIB, CONTAINER)


def test_a_budget_that_does_not_fit_is_refused_with_what_would() -> None:
    with pytest.raises(ConfigError) as caught:
        check_budget(6 * GIB + 1, 0, CONTAINER)
    assert str(caught.value) == (
        "host_memory = '6 GiB': does not fit: 6 GiB are free of a container limit of 8 GiB (cgroup); "
        "give at most 6GiB"
    )


def test_what_is_spoken_for_is_taken_off_and_said() -> None:
    with pytest.raises(
        ConfigError, match=r"6 GiB are free .*, 1.5 GiB of it spoken for; give at most 4.5GiB"
    ):
        check_budget(5 * GIB, 3 * GIB // 2, CONTAINER)


def test_where_nothing_is_left_no_size_is_suggested() -> None:
    with pytest.raises(ConfigError, match="free some memory or raise the limit first"):
        check_budget(1, 7 * GIB, CONTAINER)


def test_the_machine_is_named_when_it_binds() -> None:
    with pytest.raises(ConfigError, match="10 GiB are free of the machine's 16 GiB; give at most 10GiB"):
        check_budget(32 * GIB, 0, MemoryLimit(10 * GIB, 16 * GIB, Binding.MACHINE))


@given(room_bytes=st.integers(1, 1 << 50))
def test_the_size_suggested_is_one_that_fits(room_bytes: int) -> None:
    limit = MemoryLimit(room_bytes, 1 << 51, Binding.MACHINE)
    with pytest.raises(ConfigError) as caught:
        check_budget(room_bytes + 1, 0, limit)
    suggestion = caught.value.hint.rpartition("give at most ")[2]
    size_bytes = TypeAdapter(ByteSize).validate_python(suggestion)
    assert size_bytes > 0.98 * room_bytes - 1
    check_budget(size_bytes, 0, limit)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (512 * MIB, "512 MiB"),
        (GIB - 1, "1023.99 MiB"),
        (15 * GIB // 2, "7.5 GiB"),
        (100 * GIB, "100 GiB"),
        (3 << 60, "3145728 TiB"),
    ],
)
def test_sizes_for_people(size_bytes: int, text: str) -> None:
    assert humanised(size_bytes) == text


def test_asking_for_memory_imports_no_torch() -> None:
    code = "import sys, kvtide.transfer.memory; sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
