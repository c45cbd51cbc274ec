#!/usr/bin/env bash
# Benchmarks by id: alternates Ravel and its peer, verifies first, prints one JSON line per case.
#   tests/bench/run.sh ID... [--pairs N] [--attempts N] [--steps N] [--case CASE] [--work FOLDER] [--results FILE]
# Needs the release build and the environment of tests/interop/setup.sh; makes both when they are missing. Ids that begin with G
# (but G8) need a GPU: exit code 3, and why, where there is none; where one is, a bundle brings them along (tests/gpu/run.sh --bench ID).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[[ $# -ge 1 ]] || { echo "usage: tests/bench/run.sh ID... [--pairs N] [--attempts N] [--steps N] [--case CASE] [--work FOLDER] [--results FILE]; ids: C1 C2 C3 C4 C5 P1 P2 P3 G1 G3 G4 G5 G6 G7 G8" >&2; exit 2; }

mkdir -p build/logs
if [[ -z ${RAVEL_BIN_DIR:-} ]]; then
  deploy/install_packages.sh build >&2
  { cmake --preset release -DRAVEL_UNITY=ON && cmake --build --preset release --target \
    ravel-coordinator ravel-worker ravel-trainer ravelctl collective_speed cpu_update_speed gpu_speed fleet_load; } >build/logs/bench-build.log || { tail -30 build/logs/bench-build.log >&2; exit 1; }
  export RAVEL_BIN_DIR=$PWD/build/release/bin
fi
venv=$(tests/interop/setup.sh | tail -1)
mkdir -p build/bench
g++ -std=c++20 -O2 -ffp-contract=off -I. tests/bench/measured_roof.cc tests/kernels/cpu/fma_roof.cc -o build/bench/measured_roof -lpthread
exec "$venv/bin/python" tests/bench/harness.py "$@"
