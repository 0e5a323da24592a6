"""Text to tokens, for prompts that are recorded as text.

Knows tokenizers of the libraries ``tokenizers`` and ``transformers``, which are only imported when one is
asked for, and fetches nothing from anywhere.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtide.errors import ConfigError
from kvtide.sim.traces.options import Tokenizer

HINT = (
    "give the tokenizer.json of the model, the folder of the model, or bytes (one token a byte: prefixes are"
    " right, counts are not)"
)


class Tokens:
    """Makes tokens of text and of chats.

    Args:
        tokenizer: See ``TraceOptions``.

    Raises:
        ConfigError: There is no such tokenizer here.
    """

    def __init__(self, tokenizer: str | Tokenizer | None) -> None:
        self._template: Any = None
        self._encode: Tokenizer
        if callable(tokenizer):
            self._encode = tokenizer
        elif tokenizer == "bytes":
            self._encode = _bytes_of
        elif tokenizer is None:
            raise ConfigError("tokenizer", None, f"the trace has prompts as text: {HINT}")
        elif Path(tokenizer).is_dir():
            self._load_folder(tokenizer)
        else:
            self._load_file(tokenizer)

    def of_text(self, text: str) -> Sequence[int]:
        """Tokens of a prompt."""
        return self._encode(text)

    def of_chat(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[int]:
        """Tokens of a chat: by its model's template where there is one, else roles and contents as lines."""
        if self._template is not None:
            ids: list[int] = self._template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
            )
            return ids
        return self._encode("".join(f"{one['role']}\n{one['content']}\n" for one in messages))

    def _load_file(self, path: str) -> None:
        try:
            from tokenizers import Tokenizer as FastTokenizer
        except ImportError:
            raise _missing(path, "tokenizers") from None
        if not Path(path).is_file():
            raise ConfigError("tokenizer", path, f"no such file or folder; {HINT}")
        try:
            fast = FastTokenizer.from_file(path)
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError("tokenizer", path, f"{HINT} ({error})") from None
        self._encode = lambda text: list(fast.encode(text).ids)

    def _load_folder(self, path: str) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise _missing(path, "transformers") from None
        try:
            slow = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError("tokenizer", path, f"{HINT} ({error})") from None
        self._encode = slow.encode
        if slow.chat_template:
            self._template = slow.apply_chat_template


def _bytes_of(text: str) -> list[int]:
    return list(text.encode())


def _missing(value: str, package: str) -> ConfigError:
    return ConfigError("tokenizer", value, f"the package {package} is missing: pip install {package}")
