"""The example that needs vLLM runs as it is."""

import os
import re
import subprocess
import sys
from pathlib import Path

from engine import models

EXAMPLE = Path(__file__).parents[2] / "examples" / "offline_vllm.py"


def test_offline_vllm_brings_a_prompt_back() -> None:
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        # Half the time of a start, and as in ``tiny_engine`` one thread for a tiny model.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(EXAMPLE), str(models.llama()), "--host-memory", "64MiB"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    cached = re.findall(r"(\w+): +(\d+) of 1500 tokens cached, +[\d.]+ ms", done.stdout)
    assert cached == [("cold", "0"), ("other", "0"), ("other", "0"), ("loaded", "1472")], done.stdout
