"""One name for all that shapes the bytes; weights are told by their content."""

from pathlib import Path

import pytest

from kvtide.errors import ConfigError
from kvtide.tiers.fingerprint import PAGE_BYTES, Fingerprint, weights_digest

PARTS = {"weights": "ab12", "rope": {"factor": 1.0, "type": "yarn"}, "dtype": "bfloat16", "ranks": 2}


def test_the_order_of_parts_does_not_matter_and_their_values_do() -> None:
    one, other = Fingerprint.of(PARTS), Fingerprint.of(dict(reversed(PARTS.items())))
    assert one.digest == other.digest
    assert len(one.digest) == 32
    changed = PARTS | {"rope": {"factor": 2.0, "type": "yarn"}}
    assert Fingerprint.of(changed).digest != one.digest


def test_it_says_in_which_parts_it_differs() -> None:
    before = {"weights": "ab12", "rope": {"factor": 2.0, "type": "yarn"}, "dtype": "bfloat16", "gone": 1}
    assert Fingerprint.of(PARTS).changed(Fingerprint.of(before)) == ["gone", "ranks", "rope"]
    assert Fingerprint.of(PARTS).changed(Fingerprint.of(PARTS)) == []


def write(folder: Path, name: str, content: bytes) -> None:
    header = b'{"weight":{}}'
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(len(header).to_bytes(8, "little") + header + content)


def test_weights_are_told_by_content_and_not_by_place_or_time(tmp_path: Path) -> None:
    content = bytes(range(256)) * 400
    for folder in ("a", "b"):
        write(tmp_path / folder, "model-1.safetensors", content)
        write(tmp_path / folder, "model-2.safetensors", content[::-1])
    assert weights_digest(tmp_path / "a") == weights_digest(tmp_path / "b")


@pytest.mark.parametrize("at", [0, 1000, 50_000, 102_399])
def test_weights_that_differ_in_a_byte_of_a_small_file_are_others(tmp_path: Path, at: int) -> None:
    content = bytearray(range(256)) * 400
    write(tmp_path / "a", "model.safetensors", content)
    content[at] ^= 1
    write(tmp_path / "b", "model.safetensors", content)
    assert weights_digest(tmp_path / "a") != weights_digest(tmp_path / "b")


def test_of_a_large_file_pages_all_over_it_are_read(tmp_path: Path) -> None:
    content = bytearray(1000 * PAGE_BYTES)
    write(tmp_path / "a", "model.safetensors", content)
    before = weights_digest(tmp_path / "a")
    trained = bytearray(byte ^ 1 if at % 100 == 0 else byte for at, byte in enumerate(content))
    write(tmp_path / "a", "model.safetensors", trained)
    assert weights_digest(tmp_path / "a") != before


def test_a_file_more_or_of_another_name_are_other_weights(tmp_path: Path) -> None:
    write(tmp_path / "a", "model.safetensors", b"x" * 100)
    before = weights_digest(tmp_path / "a")
    write(tmp_path / "a", "more.safetensors", b"y" * 100)
    both = weights_digest(tmp_path / "a")
    (tmp_path / "a" / "model.safetensors").rename(tmp_path / "a" / "renamed.safetensors")
    assert len({before, both, weights_digest(tmp_path / "a")}) == 3


def test_a_folder_without_weights_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"model = '.*': no \*\.safetensors files"):
        weights_digest(tmp_path)
