"""Makes ``benchmarks`` importable: it lies beside ``src``, not in the installed package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
