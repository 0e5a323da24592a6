"""Which session a prompt belongs to: the first chunk on its path that is not shared by many.

A sample of sessions has to hold whole paths, or nothing in it would ever be a prefix of anything. The first
chunk of a prompt is no name for a session where many begin with the same system prompt. So what many have
in common is learnt, and called the *trunk*: what so many paths begin with of which none continues another.
A conversation that only grows is one path, however long. Knows fingerprints; does not know caches.
"""

from kvtide.advising import FINGERPRINT_BYTES

PATHS = 16
"""Different ones, from which on what they begin with is trunk."""

PATH_CHUNKS = 2048
"""Of a path below the trunk, that are told from others: paths that part further down count as one."""

PATH_BYTES = 16 << 20
"""All paths that are remembered together; sessions not seen for longest are forgotten first."""

TRUNK_CHUNKS = 1 << 16
"""Of the trunk at most: it is never forgotten, and grows no more from there on."""

_W = FINGERPRINT_BYTES


class SessionPaths:
    """Names sessions, and learns what they share."""

    def __init__(self) -> None:
        self._trunk: set[bytes] = set()
        self._paths: dict[bytes, list[bytes]] = {}  # by session, the longest unseen first
        self._path_bytes = 0

    @property
    def trunk_count(self) -> int:
        """Chunks that belong to no session in particular."""
        return len(self._trunk)

    @property
    def path_bytes(self) -> int:
        """Bytes of the paths that are remembered."""
        return self._path_bytes

    def session_of(self, chunks: bytes) -> bytes:
        """Name the session of a prompt, and learn from it.

        Args:
            chunks: Fingerprints of the prompt, at least one.

        Returns:
            The first that is not trunk; the last one where all are.
        """
        at = 0
        while at < len(chunks) and chunks[at : at + _W] in self._trunk:
            at += _W
        if at >= len(chunks):
            return chunks[-_W:]
        session = chunks[at : at + _W]
        self._learn(session, chunks[at : at + PATH_CHUNKS * _W])
        return session

    def _learn(self, session: bytes, path: bytes) -> None:
        paths = self._paths.pop(session, [])
        self._paths[session] = paths
        for index, known in enumerate(paths):
            if common_bytes(known, path) == min(len(known), len(path)):
                if len(path) > len(known):
                    self._path_bytes += len(path) - len(known)
                    paths[index] = path
                break
        else:
            if len(paths) < PATHS:
                paths.append(path)
                self._path_bytes += len(path)
            if len(paths) >= PATHS and len(self._trunk) < TRUNK_CHUNKS:
                self._part(session)
        while self._path_bytes > PATH_BYTES:
            self._forget(next(iter(self._paths)))

    def _part(self, session: bytes) -> None:
        """Make trunk of what all paths of a session begin with; what is below are sessions of their own."""
        paths = self._paths.pop(session)
        shared = min(common_bytes(paths[0], path) for path in paths[1:])
        self._trunk.update(paths[0][at : at + _W] for at in range(0, shared, _W))
        self._path_bytes -= shared * len(paths)
        for path in paths:
            self._paths.setdefault(path[shared : shared + _W], []).append(path[shared:])

    def _forget(self, session: bytes) -> None:
        self._path_bytes -= sum(map(len, self._paths.pop(session)))


def common_bytes(one: bytes, other: bytes) -> int:
    """Count the bytes, in whole fingerprints, that two paths begin with.

    Hashes are chained: where two are alike, so are all before them, and halving finds the end.
    """
    low, high = 0, min(len(one), len(other)) // _W
    while low < high:
        middle = (low + high + 1) // 2
        at = middle * _W
        if one[at - _W : at] == other[at - _W : at]:
            low = middle
        else:
            high = middle - 1
    return low * _W
