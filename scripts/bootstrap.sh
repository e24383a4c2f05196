#!/usr/bin/env bash
# Make .venv and install Sandyard into it: `scripts/bootstrap.sh EXTRAS`, e.g. server,train.
# Safe to repeat: does nothing when nothing changed. Installs Debian packages only as root.
set -euo pipefail
cd "$(dirname "$0")/.."

extras=${1:-server,train,data}
say() { printf '\033[1m[setup]\033[0m %s\n' "$*"; }
fail() { printf '[setup] FAILED: %s\n' "$*" >&2; exit 1; }

some() {  # of what comes in, the last line every ten seconds
  local line last="" status began=$SECONDS next=10
  while true; do
    status=0
    IFS= read -r -t 10 line || status=$?
    ((status == 0 || status > 128)) || return 0  # above 128: nothing came in that time
    ((status > 128)) || last=$line
    if ((SECONDS - began >= next)); then
      say "  $((SECONDS - began)) s: ${last:0:100}"
      next=$((SECONDS - began + 10))
    fi
  done
}

apt_install() {
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing Debian packages: $*"
    apt-get -qq update || fail "apt-get update failed; check the network and /etc/apt/sources.list.d, then run this again"
    DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$@" >/dev/null ||
      fail "apt-get install $* failed; run it by hand to see why"
  else
    fail "these Debian packages are missing: $*; run as root: apt-get install -y $*"
  fi
}

python=${PYTHON:-python3}
command -v "$python" >/dev/null || apt_install python3 python3-venv
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "$python is $("$python" -V 2>&1); Sandyard needs Python 3.11 or newer: set PYTHON=/path/to/python3.11"
"$python" -c 'import ensurepip, venv' 2>/dev/null || apt_install python3-venv
command -v git >/dev/null || apt_install git
if [[ ,$extras, == *,dev,* ]]; then
  # Of the tests: a compiler with sanitizers for the agent (the package itself makes do with PyPI's ziglang where
  # there is none), both engines, a registry to pull from, what others make, push and build images with, a shell
  # for images without a library, what networks are made with, and what guests with a kernel of their own run on.
  missing=()
  command -v cc >/dev/null || missing+=(gcc libc6-dev)
  # One of the puzzles' packages is compiled when it is installed.
  "$python" -c 'import os, sysconfig as s; os.stat(s.get_path("include") + "/Python.h")' 2>/dev/null || missing+=(python3-dev)
  command -v runc >/dev/null || [ -x /usr/sbin/runc ] || missing+=(runc)
  for tool in docker-registry buildah skopeo umoci; do
    command -v "$tool" >/dev/null || missing+=("$tool")
  done
  # Later versions of buildah do nothing without it, of whatever use it is.
  [[ " ${missing[*]} " != *" buildah "* ]] || missing+=(netavark)
  command -v busybox >/dev/null || missing+=(busybox-static)
  command -v nft >/dev/null || [ -x /usr/sbin/nft ] || missing+=(nftables)
  command -v ip >/dev/null || [ -x /usr/sbin/ip ] || missing+=(iproute2)
  command -v qemu-system-x86_64 >/dev/null || missing+=(qemu-system-x86)
  command -v qemu-img >/dev/null || missing+=(qemu-utils)
  [ ${#missing[@]} = 0 ] || apt_install "${missing[@]}"
fi

if ! [ -x .venv/bin/python ] || ! .venv/bin/python -c 'import pip' 2>/dev/null; then
  say "making .venv with $("$python" -V)"
  "$python" -m venv --clear .venv
fi

stamp=.venv/.sandyard-$(printf '%s' "$extras" | tr ',' '-')
want=$(cat pyproject.toml constraints.txt hatch_build.py scripts/bootstrap.sh | sha256sum | cut -d' ' -f1)
if [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
  say "installing Sandyard [$extras] and the versions in constraints.txt into .venv (a few minutes the first time)"
  .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt -e ".[$extras]" |
    some || fail "pip could not install; the lines above say which package. Check the package index and disk space, then run this again"
  printf '%s' "$want" >"$stamp"
fi
# The guest agent: compiled again only when its sources changed.
.venv/bin/python hatch_build.py || fail "the guest agent did not compile; the lines above say why"
say "ready: .venv/bin/sandyard"
