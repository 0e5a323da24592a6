"""What the verbs on disk folders are tried on."""

import time
from pathlib import Path

import pytest
from disk_folders import DAY_S, LARGE, LLAMA, QWEN, name_model, tier_at, write

from kvtide.cli import verify
from kvtide.tiers import disk
from kvtide.tiers.disk import DiskTier


@pytest.fixture(autouse=True)
def nobody_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "SETTLING_S", 0)


@pytest.fixture
def two_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Llama in generations 0 and 1, ten days and one hour old; Qwen, two days; one rank."""
    folder, now_s = tmp_path / "kv", time.time()
    with monkeypatch.context() as patched:
        patched.setattr(DiskTier, "_free", lambda _, places: None)  # what has ended is still there
        for fingerprint, ages in ((LLAMA, (10 * DAY_S, 3600)), (QWEN, (2 * DAY_S,))):
            tier = tier_at(folder, fingerprint)
            for generation, age_s in enumerate(ages):
                patched.setattr(disk.time, "time", lambda age_s=age_s: now_s - age_s)
                if generation:
                    tier.begin_generation(trusted=True)
                write(tier, range(100 * generation, 100 * generation + 40))
                write(tier, range(100 * generation + 50, 100 * generation + 60), LARGE)
            tier.close()
    name_model(folder, LLAMA, "meta-llama/Llama-3.1-8B", now_s - 3600)
    name_model(folder, QWEN, "Qwen/Qwen3-8B", now_s - 2 * DAY_S)
    return folder
