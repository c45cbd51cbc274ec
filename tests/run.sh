#!/usr/bin/env bash
# Installs packages, builds, lints and runs every test; the last lines are ctest's summary.
#   tests/run.sh          unit, multi-process and end-to-end tests
#   tests/run.sh --all    also those with the label slow: more seeds, more moments
#   RAVEL_PRESET=release tests/run.sh     another preset than dev; cuda finds or installs the toolkit by itself
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tests/lint/checks.sh

exclude='slow|gpu|interop'
case "${1:-}" in
  '') ;;
  --all) exclude='gpu' ;;
  *) echo "usage: tests/run.sh [--all]" >&2; exit 2 ;;
esac
preset=${RAVEL_PRESET:-dev}

deploy/install_packages.sh build test
if [[ $preset == cuda* ]]; then
  toolkit=$(deploy/install_cuda.sh)
  export CUDACXX=$toolkit/bin/nvcc
  # cuBLASLt, cuDNN and NCCL are opened by name; a machine's own settings come first.
  export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$toolkit/lib64
fi
run_lint

# Few headers are parsed once per batch of sources instead of once per source: a clean build is 3 times faster.
cmake --preset "$preset" -DRAVEL_UNITY=ON >"$(log_of "configure-$preset")" || { cat "$(log_of "configure-$preset")"; exit 1; }
cmake --build --preset "$preset"
# In pairs, but for tests that measure or start programs (RUN_SERIAL).
ctest --test-dir "build/$preset" --output-on-failure --no-tests=error -LE "$exclude" -j2
