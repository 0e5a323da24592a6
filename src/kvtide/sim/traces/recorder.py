"""Writes down what a server is asked, while it serves.

The scheduler's thread only says that a request has come and that it has ended; a thread of its own hashes
and writes. Nothing here waits for a disk or fails a request: what is too much is left out, and when writing
fails, recording ends; both are said once. Knows block hashes and counts of tokens, and no text.
"""

import hashlib
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from kvtide.errors import ConfigError
from kvtide.sim.traces.recording import HASH_BYTES, header_line, request_line

logger = logging.getLogger(__name__)

BACKLOG_BLOCKS = 1 << 19
"""Block hashes that may wait to be written: some 50 MiB. Beyond it requests are left out."""

SLICE_BLOCKS = 256
"""Hashes between two times at which the thread gives way: about a quarter of a millisecond."""

NAMES = 1000
"""Files beside each other: one for each start and for each scheduler process."""

SETTING = "record_trace"


class _Ended(NamedTuple):
    """A request, as the scheduler's thread leaves it."""

    arrival_s: float
    open_since_s: float
    prompt_tokens: int
    output_tokens: int
    block_hashes: Sequence[bytes]


class TraceRecorder:
    """One recording, from the start of a scheduler process to its end.

    Args:
        path: Of the file, which is made, readable by nobody else. Where one is there already, the first free
            name of ``trace.2.jsonl``, ``trace.3.jsonl`` and so on is taken: another process may write it.
        block_tokens: Tokens of a block hash.
        limit_bytes: That the file may take; then recording ends.
        began_s: Now, of the clock that arrivals are told by.
        open_file: Opens a path for writing, that must not be there; replaced in tests.

    Raises:
        ConfigError: The file cannot be made.
    """

    def __init__(
        self,
        path: str,
        block_tokens: int,
        limit_bytes: int,
        began_s: float,
        open_file: Callable[[Path], int] | None = None,
    ) -> None:
        self._block_tokens = block_tokens
        self._limit_bytes = limit_bytes
        self.path, self._file = _make(Path(path), open_file or _open_new)
        self._began_s, self._began_unix_s = began_s, time.time()
        # Nobody keeps it: without it a hash says nothing of the prompt.
        self._salt = secrets.token_bytes(32)
        self._open: dict[str, float] = {}  # when each came, the oldest first
        self._queue: queue.SimpleQueue[_Ended | None] = queue.SimpleQueue()
        self._offered_blocks = self._written_blocks = 0
        self._over = False
        self._left_out = False
        self._thread = threading.Thread(target=self._write_all, name="kvtide-recorder", daemon=True)
        self._thread.start()
        logger.info("recording what is asked to %s, at most %d bytes", self.path, limit_bytes)

    # -- the scheduler's thread -----------------------------------------------------------------

    def arrived(self, request_id: str, now_s: float) -> None:
        """Take note of a request that has come, at ``now_s``."""
        if not self._over:
            self._open[request_id] = now_s - self._began_s

    def ended(
        self,
        request_id: str,
        prompt_tokens: int,
        output_tokens: int,
        block_hashes: Sequence[bytes],
        now_s: float,
    ) -> None:
        """Take note of a request that has ended, however it did.

        Args:
            request_id: As it came.
            prompt_tokens: Of the prompt.
            output_tokens: Generated; the last of them was never computed, and the block it fills is none.
            block_hashes: Of prompt and answer, chained.
            now_s: Now.
        """
        arrival_s = self._open.pop(request_id, None)
        if arrival_s is None or self._over:
            return
        computed_blocks = (prompt_tokens + max(0, output_tokens - 1)) // self._block_tokens
        block_hashes = block_hashes[:computed_blocks]  # a copy
        if self._offered_blocks - self._written_blocks + len(block_hashes) > BACKLOG_BLOCKS:
            if not self._left_out:
                self._left_out = True
                logger.warning("%s: requests end faster than they are written; some are left out", self.path)
            return
        self._offered_blocks += len(block_hashes)
        open_since_s = next(iter(self._open.values()), now_s - self._began_s)
        self._queue.put(_Ended(arrival_s, open_since_s, prompt_tokens, output_tokens, block_hashes))

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what is there and end; give up after ``timeout_s``. A second call does nothing."""
        self._over = True
        self._open.clear()
        self._queue.put(None)
        self._thread.join(timeout_s)

    # -- the recorder's thread ------------------------------------------------------------------

    def _write_all(self) -> None:
        try:
            size_bytes = self._write(header_line(self._block_tokens, self._began_unix_s))
            while (ended := self._queue.get()) is not None:
                line = self._line(ended)
                self._written_blocks += len(ended.block_hashes)
                if size_bytes + len(line) > self._limit_bytes:
                    logger.info("%s: has its %d bytes, recording ends", self.path, self._limit_bytes)
                    break
                size_bytes += self._write(line)
        except OSError as error:
            logger.warning("%s: %s, recording ends", self.path, error.strerror or error)
        except Exception:  # whatever it is, it is no request's business
            logger.exception("%s: recording ends", self.path)
        finally:
            self._over = True
            os.close(self._file)

    def _write(self, line: bytes) -> int:
        rest = memoryview(line)
        while rest:
            rest = rest[os.write(self._file, rest) :]
        return len(line)

    def _line(self, ended: _Ended) -> bytes:
        hashes: list[bytes] = []
        for start in range(0, len(ended.block_hashes), SLICE_BLOCKS):
            hashes += map(self._salted, ended.block_hashes[start : start + SLICE_BLOCKS])
            time.sleep(0)
        prompt_blocks = ended.prompt_tokens // self._block_tokens
        return request_line(
            ended.arrival_s,
            ended.open_since_s,
            ended.prompt_tokens,
            ended.output_tokens,
            hashes[:prompt_blocks],
            hashes[prompt_blocks:],
        )

    def _salted(self, block_hash: bytes) -> bytes:
        return hashlib.blake2b(block_hash, digest_size=HASH_BYTES, key=self._salt).digest()


def _open_new(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _make(path: Path, open_file: Callable[[Path], int]) -> tuple[Path, int]:
    for number in range(1, NAMES + 1):
        one = path if number == 1 else path.with_name(f"{path.stem}.{number}{path.suffix}")
        try:
            return one, open_file(one)
        except FileExistsError:
            continue
        except OSError as error:
            hint = f"{error.strerror or error}: give a file in a folder that is there and may be written to"
            raise ConfigError(SETTING, str(path), hint) from None
    raise ConfigError(
        SETTING, str(path), f"{NAMES} recordings are there already: remove some, or give another name"
    )
