#!/usr/bin/env bash
# Runs what needs a GPU from a portable bundle (README.md), finds the CUDA libraries by itself, prints one summary.
#   tests/gpu/run.sh [BUNDLE] [--out FOLDER] [--suite NAME]... [--filter GOOGLETEST_FILTER] [--bench ID]... [--list]
#     with --bench: [--pairs N] [--case CASE]... [--work FOLDER]
# BUNDLE: the bundle that this script lies in, by default. Needs a driver, CUDA 13 libraries and Python 3.9; PyTorch for --bench.
# Exit code: 0 all passed; 1 something failed; 2 wrong use, or a bundle that is not whole; 3 nothing failed, but there is no
# usable device, and what needs one was skipped; 4 a library is too old or from different versions.
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
python=${RAVEL_PYTHON:-python3}
command -v "$python" >/dev/null || { echo "run.sh: no $python; set RAVEL_PYTHON to the interpreter that has PyTorch" >&2; exit 2; }
exec "$python" -B "$here/run_suites.py" "$@"
