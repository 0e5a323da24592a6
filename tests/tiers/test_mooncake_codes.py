"""Mooncake's numbers: which are misses, which say full, and that none is passed over."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.errors import TierFullError, TierUnavailableError
from kvtide.tiers.mooncake_codes import FULL, MISSES, Code, error_of, name_of


def test_the_numbers_are_those_of_the_library() -> None:
    assert {code.name: code.value for code in (*MISSES, *FULL)} == {
        "OBJECT_NOT_FOUND": -704,
        "REPLICA_IS_NOT_READY": -703,
        "LEASE_EXPIRED": -707,
        "REPLICA_NOT_FOUND": -710,
        "REPLICA_IS_GONE": -712,
        "NO_AVAILABLE_HANDLE": -200,
        "TENANT_QUOTA_EXCEEDED": -1700,
    }
    assert (Code.OK, Code.OBJECT_ALREADY_EXISTS, Code.TRANSFER_FAIL, Code.RPC_FAIL) == (0, -705, -800, -900)


@pytest.mark.parametrize("code", sorted(set(Code) - MISSES - {Code.OK}))
def test_every_other_code_is_an_error_that_says_its_name_and_number(code: Code) -> None:
    error = error_of(code, "mooncake at here: reading")
    assert type(error) is (TierFullError if code in FULL else TierUnavailableError)
    assert str(error).startswith(f"mooncake at here: reading: {code.name} ({code.value})")


@given(st.integers(max_value=-1).filter(lambda code: code not in set(Code)))
def test_a_code_that_nobody_knows_is_told_as_it_is(code: int) -> None:
    error = error_of(code, "writing")
    assert type(error) is TierUnavailableError
    assert str(error) == f"writing: unknown code {code}" == f"writing: {name_of(code)}"
