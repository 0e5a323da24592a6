"""The tier in ``examples/own_tier.py`` keeps the contract, and does what it says when it is run."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from kvtide.errors import ConfigError
from kvtide.keys import OffloadKey
from kvtide.testing import PrivateTierTests
from kvtide.tiers.base import Tier, TierPlace
from kvtide.tiers.records import HEADER_BYTES, RecordIdentity

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_tier.py"
FolderTier = runpy.run_path(str(EXAMPLE))["FolderTier"]


class TestFolderTier(PrivateTierTests):
    def make(self, place: Any, identity: RecordIdentity) -> Tier:
        tier: Tier = FolderTier(place, identity, 1 << 20)
        return tier

    def damage(self, tier: Any, key: OffloadKey) -> None:
        record = bytearray(tier._path(key).read_bytes())
        record[HEADER_BYTES + 1000] ^= 1
        tier._path(key).write_bytes(record)

    def lose(self, tier: Any, key: OffloadKey) -> None:
        tier._path(key).unlink()


def test_it_is_built_from_settings_and_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    identity = RecordIdentity(bytes(32))
    tier = FolderTier.build(TierPlace(identity, 3, 1 << 20, {"folder": str(tmp_path)}))
    tier.open()
    assert (tmp_path / "rank-3").is_dir()
    with pytest.raises(ConfigError, match=r"tiers\.options"):
        FolderTier.build(TierPlace(identity, 0, 1 << 20, {"path": "/x"}))


def test_run_as_a_program_it_shows_what_a_tier_does(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr().out
    assert "after a restart it lists 1 record" in said
    assert "read: True, the very same: True" in said
    assert "one bit flipped: the payload is damaged" in said
    assert said.endswith("and then: False\n")
