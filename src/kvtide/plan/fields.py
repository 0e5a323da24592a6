"""Fields of a configuration, read one at a time: what is missing or no number is refused by its name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from kvtide.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}

LARGEST = 1 << 40
"""No count in a configuration is as large; what is would only end in numbers nobody can read."""

EXPERT_COUNTS = ("num_local_experts", "n_routed_experts", "num_experts")


@dataclass(frozen=True, slots=True)
class Fields:
    """A configuration's fields, and the name it goes by in errors."""

    fields: Mapping[str, Any]
    name: str

    def has(self, field: str) -> bool:
        """Whether a field says anything: null, false, 0 and an empty list do not."""
        return bool(self.fields.get(field))

    def count(self, field: str, default: int | None = None) -> int:
        """Read a whole number above 0.

        Raises:
            ConfigError: It is missing, and nothing stands for it, or it is none.
        """
        value = self.fields.get(field)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST:
            self.refuse(field, "should be a whole number above 0")
        return int(value)

    def text(self, field: str) -> str:
        """Read a name; empty where there is none."""
        value = self.fields.get(field)
        return value if isinstance(value, str) else ""

    def numbers(self, field: str, length: int) -> list[Any]:
        """Read a list with an entry for each layer.

        Raises:
            ConfigError: It is none, or of another length.
        """
        value = self.fields.get(field)
        if not isinstance(value, list) or len(value) != length:
            size = f"has {len(value)} entries" if isinstance(value, list) else "is no list"
            raise ConfigError(
                "model", self.name, f"{field} {size} there, and should have one for each of {length} layers"
            )
        return value

    def dtype_bytes(self) -> int:
        """Bytes of one number as the model computes.

        Raises:
            ConfigError: A type nobody knows.
        """
        dtype = self.text("dtype") or self.text("torch_dtype") or "bfloat16"
        if dtype not in DTYPE_BYTES:
            self.refuse("dtype", f"known are {', '.join(DTYPE_BYTES)}", dtype)
        return DTYPE_BYTES[dtype]

    def refuse(self, field: str, hint: str, value: object = None) -> NoReturn:
        """End with what a field says and what it should.

        Raises:
            ConfigError: Always.
        """
        found = self.fields.get(field) if value is None else value
        shown = repr(found)
        shown = shown if len(shown) <= 60 else shown[:59] + "…"
        raise ConfigError("model", self.name, f"{field} is {shown} there, and {hint}")
