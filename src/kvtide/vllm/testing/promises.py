"""The ways in which a promise can be broken."""


class WrongBytesError(AssertionError):
    """A forward was about to read bytes that its prefix does not demand."""


class HangError(AssertionError):
    """Something did not end, ended wrongly, or waited where nothing may wait."""


class LeakError(AssertionError):
    """Something was left over, or was kept and is not found again."""
