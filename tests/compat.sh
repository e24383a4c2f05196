#!/usr/bin/env bash
# Drive a server of ours with unmodified releases of the official SDK: `tests/compat.sh CHECKS_FOLDER`.
# CHECKS_FOLDER holds e2b_smoke.py, a black-box check that is not part of this repository.
set -euo pipefail
cd "$(dirname "$0")/.."
checks=${1:-../shared/checks}
[ -f "$checks/e2b_smoke.py" ] || { echo "no e2b_smoke.py in $checks; name its folder: make compat CHECKS=/path" >&2; exit 2; }

failed=0
for version in 2.63.0 2.45.1; do
  venv=.cache/compat/e2b-$version
  [ -x "$venv/bin/python" ] || .venv/bin/python -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "e2b==$version"
  echo "== e2b $version"
  .venv/bin/sandyard serve -- "$venv/bin/python" "$checks/e2b_smoke.py" || failed=1
done
exit $failed
