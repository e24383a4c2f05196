#!/usr/bin/env bash
# Write the versions in .venv to constraints.txt. Local version labels (a CPU build of torch) are dropped:
# pip then takes the build that the machine's index offers.
set -euo pipefail
cd "$(dirname "$0")/.."
{
  echo "# Exact versions that pip installs with; written by \`make lock\`."
  .venv/bin/python -m pip freeze --exclude-editable --exclude sandyard |
    grep -vE '^(#|-e|nvidia-|cuda-|triton)' | grep '==' | sed -E 's/\+[a-z0-9.]+$//'
} >constraints.txt
wc -l constraints.txt
