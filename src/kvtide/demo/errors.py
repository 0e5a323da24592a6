"""What ends the demo before it has something to report."""

from kvtide.errors import KVTideError


class DemoError(KVTideError):
    """The demo cannot go on; says what failed and where to look."""
