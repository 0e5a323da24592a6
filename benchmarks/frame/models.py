"""Which model the benchmarks run.

The demo's, so that it is fetched and converted once; or a folder that was named.
"""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.frame.registry import UnfitError

MODELS = Path(__file__).parents[2] / "build" / "models"


def model_folder(named: Path | None, say: Callable[[str], None]) -> Path:
    """Return the folder of the model to run.

    Args:
        named: What was asked for, None for SmolLM2-135M as the demo has it.
        say: Is told when the model is fetched or converted.

    Raises:
        UnfitError: The folder holds no model, or none could be had.
    """
    if named is not None:
        if not (named / "config.json").is_file():
            raise UnfitError(f"--model {named}: there is no config.json in it; name a model's folder")
        return named
    from kvtide.demo.errors import DemoError
    from kvtide.demo.model import ensure_model

    try:
        # What it prints is not the result that --json promises on stdout.
        with contextlib.redirect_stdout(sys.stderr):
            return ensure_model(MODELS, say)
    except DemoError as error:
        raise UnfitError(f"the model: {error}") from None
