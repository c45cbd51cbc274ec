#!/usr/bin/env bash
# Finds or makes a CUDA 13 toolkit with cuBLASLt, cuDNN and NCCL; the last line of stdout is its folder. No root needed.
#   deploy/install_cuda.sh
# In this order: RAVEL_CUDA_HOME; /usr/local/cuda; build/cuda-toolkit, made from the wheels of deploy/cuda_wheels.txt (1.3 GB
# from PyPI, once). Exit 1, with what was tried and what it lacks, where none can be had.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
made=$PWD/build/cuda-toolkit

# Says on stderr what is missing from a toolkit.
complete() {
  local at=$1 file
  for file in bin/nvcc include/cuda_runtime_api.h include/nv/target include/nvtx3/nvToolsExt.h include/cublasLt.h \
    include/cudnn.h include/nccl.h lib64/libcudart_static.a lib64/libcudart.so; do
    # Headers of the C++ core libraries lie one folder deeper since CUDA 13.
    if [[ ! -e $at/$file && ! -e $at/include/cccl/${file#include/} ]]; then
      echo "install_cuda.sh: $at: no $file" >&2
      return 1
    fi
  done
  "$at/bin/nvcc" --version | grep -q 'release 13\.' || {
    echo "install_cuda.sh: $at: nvcc is not of CUDA 13" >&2
    return 1
  }
}

make_from_wheels() {
  local log=build/logs/cuda-wheels.log part library
  mkdir -p build/logs
  deploy/install_packages.sh cuda >&2 || return
  echo "install_cuda.sh: CUDA from PyPI into $made (log: $log)" >&2
  rm -rf "$made" "$made.part"
  # A private folder: what the system's Python has is neither used nor changed.
  python3 -m pip install --quiet --disable-pip-version-check --no-deps --only-binary=:all: --target "$made.part/wheels" \
    --requirement deploy/cuda_wheels.txt >"$log" 2>&1 || { tail -n 20 "$log" >&2; return 1; }
  for part in "$made.part"/wheels/nvidia/{cu13,cudnn,nccl}; do
    cp --recursive --link "$part/." "$made.part/"
  done
  # Licences, which an image must have.
  mkdir "$made.part/dist-info" && mv "$made.part"/wheels/*.dist-info "$made.part/dist-info/"
  rm -rf "$made.part/wheels"
  ln -s lib "$made.part/lib64"
  for library in "$made.part"/lib/lib*.so.*; do
    library=$(basename "$library")
    [[ -e $made.part/lib/${library%%.so.*}.so ]] || ln -s "$library" "$made.part/lib/${library%%.so.*}.so"
  done
  mv "$made.part" "$made"
}

if [[ -n ${RAVEL_CUDA_HOME:-} ]]; then
  complete "$RAVEL_CUDA_HOME"
  echo "$RAVEL_CUDA_HOME"
  exit
fi
for toolkit in /usr/local/cuda "$made"; do
  if [[ -d $toolkit ]] && complete "$toolkit"; then
    echo "$toolkit"
    exit
  fi
done
if ! make_from_wheels || ! complete "$made"; then
  echo "install_cuda.sh: no CUDA 13 toolkit: /usr/local/cuda is missing or incomplete, and the wheels of" \
    "deploy/cuda_wheels.txt could not be installed; set RAVEL_CUDA_HOME to a toolkit" >&2
  exit 1
fi
echo "$made"
