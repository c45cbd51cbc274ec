#!/usr/bin/env bash
# clang-tidy and clang's lock analysis on the .cc files that changed since the commit in RAVEL_LINT_BASE
# (default: the parent of the last commit), newest first, for at most RAVEL_LINT_SECONDS (default 300).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
source tests/lint/checks.sh
base=${RAVEL_LINT_BASE:-HEAD~1}
limit_s=${RAVEL_LINT_SECONDS:-300}
tidy=$(command -v clang-tidy-19 || command -v clang-tidy) || { echo "tidy: no clang-tidy" >&2; exit 1; }

if ! git rev-parse -q --verify "$base^{commit}" >/dev/null; then
  echo "tidy: no commit $base to compare with: nothing checked"
  exit 0
fi
mapfile -t files < <(git diff --name-only --diff-filter=d "$base" -- '*.cc' | grep -v '^tests/' || true)
if [[ ${#files[@]} == 0 ]]; then
  echo "tidy: no changed sources since $base"
  exit 0
fi

# The lint preset's command lines name every source; generated headers come from the build that tests/run.sh made.
cmake --preset lint >"$(log_of configure-lint)" || { cat "$(log_of configure-lint)"; exit 1; }
generated=build/${RAVEL_PRESET:-dev}
findings=$(log_of tidy-findings)
: >"$findings"
status=0
checked=0
for file in "${files[@]}"; do
  if ((SECONDS > limit_s)); then
    echo "tidy: time is up, not checked: ${files[*]:checked}"
    break
  fi
  "$tidy" --quiet -p build/lint --extra-arg="-isystem$PWD/$generated" "$file" 2>/dev/null | tee -a "$findings"
  ((PIPESTATUS[0] == 0)) || status=1
  checked=$((checked + 1))
done
echo "tidy: $(grep -c ': error: ' "$findings" || true) finding(s); $checked of ${#files[@]} changed sources checked since $base with $("$tidy" --version | grep -o 'version [0-9.]*')"
exit $status
