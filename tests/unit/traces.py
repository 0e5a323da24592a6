"""Trace files as tests write them."""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SAMPLE = Path(__file__).parents[2] / "examples" / "traces" / "mooncake-conversation-1500.jsonl.gz"

MOONCAKE = {"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 2353]}
BAILIAN = {
    "chat_id": 159,
    "parent_chat_id": -1,
    "timestamp": 61.114,
    "input_length": 40,
    "output_length": 132,
    "type": "text",
    "turn": 1,
    "hash_ids": [1089, 1090, 6326],
}
AGENT = {
    "timestamp": 0,
    "session_id": "d80534",
    "source": "miniswe",
    "block_size": 16,
    "input_length": 40,
    "output_length": 7,
    "hash_ids": [1, 2],
}
CALL = {"t": 0.0, "type": "s", "in": 130, "out": 5, "hash_ids": [1, 2]}
SESSION = {
    "id": "trace_0001",
    "block_size": 64,
    "hash_id_scope": "local",
    "tool_tokens": 10,
    "system_tokens": 5,
    "requests": [CALL],
}


def write_lines(path: Path, records: Iterable[Any]) -> Path:
    """Write records as JSON lines; what is text or bytes already is written as it is."""
    lines = [
        one if isinstance(one, bytes) else (one if isinstance(one, str) else json.dumps(one)).encode()
        for one in records
    ]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def write_document(path: Path, document: Any) -> Path:
    """Write one document, packed where the name says so."""
    text = json.dumps(document).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path
