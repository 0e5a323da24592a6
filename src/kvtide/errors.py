"""Every error that kvtide raises, and whose fault each one is.

    KVTideError
    ├── ConfigError             a setting is wrong: names it, shows the value, says what would do
    ├── LayoutError             KV tensors of a shape nobody has verified
    ├── IllegalTransitionError  our bug; state unchanged
    ├── MissingChunkError       a chunk that was ready has gone; nothing was pinned
    ├── TraceError              a record of a trace is none: names file, line and fault
    └── TierError               never fatal, ends as a miss
        ├── TierUnavailableError   refused, unreachable, past its deadline
        ├── TierFullError          no room; the store is skipped
        └── CorruptRecordError     not the bytes that were written; forget the key

Inside a process these are exceptions; between processes results are values (``kvtide.jobs``).
"""


class KVTideError(Exception):
    """Root of everything raised on purpose."""


class ConfigError(KVTideError, ValueError):
    """A setting is wrong.

    Args:
        setting: Name of the setting as the user writes it.
        value: What was found there.
        hint: What would do.
    """

    def __init__(self, setting: str, value: object, hint: str) -> None:
        super().__init__(f"{setting} = {value!r}: {hint}")
        self.setting = setting
        self.value = value
        self.hint = hint

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[str, object, str]]:
        """Pickle by the three arguments; the default would pass the joined message alone."""
        return type(self), (self.setting, self.value, self.hint)


class LayoutError(KVTideError):
    """KV tensors of a shape or order that nobody has verified; says which, and what is known."""


class IllegalTransitionError(KVTideError):
    """An event that its state does not allow: our bug. The state is unchanged."""


class MissingChunkError(KVTideError):
    """A chunk that should be ready is not; nothing was pinned."""


class TraceError(KVTideError):
    """A file is no trace, or a record of it is bad.

    Args:
        path: Of the file.
        where: Line, or the record's place within a document; empty for the file itself.
        fault: What is wrong with it.
    """

    def __init__(self, path: str, where: str, fault: str) -> None:
        super().__init__(f"{path}, {where}: {fault}" if where else f"{path}: {fault}")
        self.path = path
        self.where = where
        self.fault = fault

    def __reduce__(self) -> tuple[type["TraceError"], tuple[str, str, str]]:
        """Pickle by the three arguments; the default would pass the joined message alone."""
        return type(self), (self.path, self.where, self.fault)


class TierError(KVTideError):
    """Trouble of a medium; ends as a miss, never as a request's trouble."""


class TierUnavailableError(TierError):
    """Refused, unreachable, or past its deadline."""


class NodeUnavailableError(TierUnavailableError):
    """A part of the medium is; the rest goes on, and the tier is not left out for it."""


class TierFullError(TierError):
    """No room: the store is skipped."""


class CorruptRecordError(TierError):
    """Not the bytes that were written; the key is to be forgotten."""
