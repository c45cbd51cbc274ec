#!/usr/bin/env bash
# One row of the quickstart matrix, as ctest runs it: tests/deploy/quickstart_row.sh BIN_DIR OPTIONS OF deploy/quickstart.sh...
# The Bible model must learn (quickstart.sh compares its last loss with the unigram entropy of the text), the job must name
# the path of each class of gemms where there is a recipe and none where there is not, and the checkpoint must write text.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[[ $# -ge 1 ]] || { echo "usage: tests/deploy/quickstart_row.sh BIN_DIR [options of deploy/quickstart.sh]" >&2; exit 2; }
export RAVEL_BIN_DIR=$1
shift

# The text comes from Debian packages: without them there is nothing to train on.
if ! deploy/corpus.sh bible build/quickstart/bible/text; then
  [[ ,${RAVEL_REQUIRE:-}, != *,corpus,* ]] || { echo "quickstart_row.sh: no text; RAVEL_REQUIRE lists corpus" >&2; exit 1; }
  echo "quickstart_row.sh: skipped: the packages of the text cannot be had here"
  exit 77
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
fail() { echo "quickstart_row.sh: $1" >&2; exit 1; }
deploy/quickstart.sh "$@" 2>&1 | tee "$log"

# "Gemm path, input gradient   cpu_reference", once for each class.
paths=$(grep -cE '^Gemm path, (forward|input gradient|weight gradient) +cpu_reference$' "$log" || true)
expected=0
[[ " $* " != *' --recipe '* ]] || expected=3
[[ $paths == "$expected" ]] || fail "$paths of $expected classes of gemms have a path"
grep -q '^last loss ' "$log" || fail "no last loss"
# The text after the prompt.
text=$(sed -n '/^sample:$/,$p' "$log" | tail -n +2)
((${#text} > 60)) || fail "the checkpoint wrote only '$text'"
