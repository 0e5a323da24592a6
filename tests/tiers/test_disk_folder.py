"""The folder of a disk: one instance at a time, and it is known for which models there are records."""

import json
from pathlib import Path

import pytest

from kvtide.errors import ConfigError, TierUnavailableError
from kvtide.tiers.disk_folder import FolderLock, KnownFingerprints, session_of
from kvtide.tiers.fingerprint import Fingerprint

OLD, NEW = Fingerprint.of({"weights": "a", "dtype": "x"}), Fingerprint.of({"weights": "b", "dtype": "x"})


def test_a_rank_s_folder_has_one_owner_at_a_time_and_ranks_do_not_disturb_one_another(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path, 0)
    other_rank = FolderLock(tmp_path, 1)
    with pytest.raises(ConfigError, match="another instance uses this folder"):
        FolderLock(tmp_path, 0)
    assert session_of(tmp_path, 0) == lock.session != other_rank.session
    lock.release()
    other_rank.release()
    again = FolderLock(tmp_path, 0)
    assert session_of(tmp_path, 0) == again.session != lock.session
    again.release()


def test_a_run_that_is_over_is_none(tmp_path: Path) -> None:
    with pytest.raises(TierUnavailableError):
        session_of(tmp_path, 0)
    FolderLock(tmp_path, 0).release()
    with pytest.raises(TierUnavailableError, match="no rank has this folder"):
        session_of(tmp_path, 0)


def test_a_folder_that_cannot_be_made_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"disk = '.*file': cannot be used"):
        FolderLock(tmp_path / "file", 0)


def test_it_is_told_what_has_changed_since_the_last_model(tmp_path: Path) -> None:
    known = KnownFingerprints(tmp_path)
    assert known.changed(NEW) is None
    known.note(OLD, "a model")
    assert known.changed(NEW) == ["weights"]
    known.note(NEW, "a model")
    assert known.changed(NEW) == []
    assert known.changed(OLD) == []  # its records may still be there
    assert [(model, one) for _, model, one in known.all()] == [("a model", OLD), ("a model", NEW)]
    known.note(OLD, "a model")
    assert [one for _, _, one in known.all()] == [NEW, OLD]


def test_what_is_noted_is_for_its_owner_alone_and_damage_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    known = KnownFingerprints(tmp_path)
    known.note(OLD, "a model")
    (path,) = (tmp_path / "fingerprints").iterdir()
    assert path.name == f"{OLD.digest.hex()}.json"
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert json.loads(path.read_text()).keys() == {"model", "text", "last_used_s"}
    for content in ("", "{}", "[1]", path.read_text().replace("weights", "heights")):
        path.write_text(content)
        assert known.all() == []
        assert known.changed(OLD) is None
