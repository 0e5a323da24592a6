"""What every S3 server is tested with: the tests for tiers, and records damaged behind a tier's back."""

from typing import Any

import obstore

from kvtide.testing.tiers import IDENTITY, TierTests
from kvtide.tiers.base import TierPlace
from kvtide.tiers.objects import ObjectsTier
from kvtide.tiers.records import HEADER_BYTES, RecordIdentity


def tier_of(options: dict[str, Any], identity: RecordIdentity = IDENTITY) -> ObjectsTier:
    return ObjectsTier.build(TierPlace(identity, 0, 0, options))


class OverS3(TierTests):
    """``place`` is the tier's options."""

    def make(self, place: dict[str, Any], identity: RecordIdentity) -> ObjectsTier:
        return tier_of(place, identity)

    def damage(self, tier: ObjectsTier, key: Any) -> None:
        store, path = tier._bucket._store, tier._path_of(key)
        record = bytearray(obstore.get(store, path).bytes())
        record[HEADER_BYTES + 100] ^= 4
        obstore.put(store, path, bytes(record))

    def lose(self, tier: ObjectsTier, key: Any) -> None:
        obstore.delete(tier._bucket._store, tier._path_of(key))
