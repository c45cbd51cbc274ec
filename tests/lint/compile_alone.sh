#!/usr/bin/env bash
# Compiles each source that changed in the last 20 commits by itself, newest first and at most 60 of them, without code: a build
# with RAVEL_UNITY parses eight at a time, so that one source's includes may serve another.
#   tests/lint/compile_alone.sh BUILD_FOLDER     a built tree, for its generated headers
# Exit code 1: the sources that do not compile alone are named, with what the compiler says.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
[[ $# == 1 && -d $1 ]] || { echo "usage: tests/lint/compile_alone.sh BUILD_FOLDER" >&2; exit 2; }
generated=$1

# Device code needs the toolkit's headers and is never in a batch.
mapfile -t files < <(git log -n 20 --name-only --format= -- '*.cc' | grep -Ev '^(tests|kernels/cuda)/' | awk '!seen[$0]++' |
  while read -r file; do [[ ! -f $file ]] || echo "$file"; done | head -n 60)
[[ ${#files[@]} != 0 ]] || { echo "compile_alone: no changed sources"; exit 0; }

check() {
  g++ -std=c++20 -fsyntax-only -w -fmax-errors=3 -I. -isystem "$1" "$2" || { echo "compile_alone: $2 does not compile alone"; exit 1; }
}
export -f check
printf '%s\0' "${files[@]}" | xargs -0 -n 1 -P 2 bash -c 'check "$0" "$1"' "$generated" || exit 1
echo "compile_alone: ${#files[@]} changed sources compile alone"
