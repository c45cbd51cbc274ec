#!/usr/bin/env bash
# Fails, naming file and line, where clang-format would change a source; `--fix` changes it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source tests/lint/checks.sh
if [[ "${1:-}" == --fix ]]; then
  sources h cc cu cuh | xargs -r clang-format -i
else
  # Of each file the first line that would change.
  found=$({ sources h cc cu cuh | xargs -r -n 16 -P 2 clang-format --dry-run -Werror 2>&1 || true; } |
    awk -F: '/: error:/ && !seen[$1]++ { print $1 ":" $2 ": not as clang-format lays it out" }')
  if [[ -n $found ]]; then
    echo "$found"
    echo "format: $(wc -l <<<"$found") file(s); tests/lint/check_format.sh --fix"
    exit 1
  fi
  echo "format: ok"
fi
