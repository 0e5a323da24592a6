#!/bin/sh
# Installs what tests/browser opens pages with: Debian's Chromium, and Playwright from PyPI to drive it.
# Safe to run again; quick when all is there. Without a browser those tests fail: none of them is skipped.
set -eu
venv=${1:-.venv}
stamp="$venv/.kvtide-browser"

say() { printf '\033[1m%s\033[0m\n' "$*"; }
die() { printf 'browser: %s\n' "$*" >&2; exit 1; }

if ! command -v chromium >/dev/null 2>&1; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
        die "install the package chromium and run this again"
    fi
    say "installing chromium"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null
fi

if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ]; then
    say "installing Playwright from PyPI into $venv"
    "$venv/bin/pip" install -q --disable-pip-version-check -e '.[replay,browser]' >"$venv/browser.log" 2>&1 \
        || { tail -n 20 "$venv/browser.log" >&2; die "see $venv/browser.log"; }
    touch "$stamp"
fi
