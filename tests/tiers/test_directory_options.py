"""Options of the directory tier: what will not do is refused by its name."""

from typing import Any

import pytest

from kvtide.errors import ConfigError
from kvtide.testing.tiers import IDENTITY
from kvtide.tiers.base import TierPlace
from kvtide.tiers.named import check_tier, tier_named


@pytest.mark.parametrize(
    ("options", "setting", "said"),
    [
        ({}, "tiers.options.path", "is needed"),
        ({"path": ""}, "tiers.options.path", "at least 2"),
        ({"path": "kv"}, "tiers.options.path", "absolute"),
        ({"path": "~/kv"}, "tiers.options.path", "absolute"),
        ({"path": "/mnt/\0"}, "tiers.options.path", "absolute"),
        ({"path": 7}, "tiers.options.path", "string"),
        ({"path": "/mnt/kv", "fsync": "maybe"}, "tiers.options.fsync", "boolean"),
        ({"path": "/mnt/kv", "folder": "x"}, "tiers.options.folder", "there are path, fsync"),
    ],
)
def test_options_that_will_not_do_are_refused_by_name(
    options: dict[str, Any], setting: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        tier_named("directory", TierPlace(IDENTITY, 0, 0, options))
    assert caught.value.setting == setting
    with pytest.raises(ConfigError, match=said):
        check_tier("directory", "directory", 0, options)
