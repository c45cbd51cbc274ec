# shellcheck shell=bash
# Checks that need no build; sourced by tests/run.sh and .ci/run, and by ctest through check_format.sh.

# The file that holds the long output of a step.
log_of() {
  mkdir -p build/logs
  echo "build/logs/$1.log"
}

# Tracked and new sources of ours in the given extensions.
sources() {
  local patterns=()
  for extension in "$@"; do patterns+=("*.$extension"); done
  git ls-files -co --exclude-standard -- "${patterns[@]}" | while read -r file; do [[ -f $file ]] && echo "$file"; done
}

run_lint() {
  python3 tests/lint/lint.py --need-ctags
  python3 tests/lint/readme_commands.py
  bash tests/lint/check_format.sh
}
