#!/usr/bin/env bash
# Runs deploy/slurm/ravel-workers.sbatch with a stub in place of srun, which starts one task, and one in place of ravel-worker. However
# the task ends, the folder with the node's key is gone and the exit code is the daemon's; a drain fits into Slurm's KillWait.
#   tests/deploy/slurm_test.sh [SCRIPT]
set -euo pipefail
script=$(realpath "${1:-$(dirname "${BASH_SOURCE[0]}")/../../deploy/slurm/ravel-workers.sbatch}")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/bin" "$scratch/tmp"
failed=0
kill_wait_s=30  # Slurm's default

cat >"$scratch/bin/srun" <<'STUB'
#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
echo $$ >"$SCRATCH/task"
exec "$@"
STUB

# STUB_JOIN and STUB_EXIT are the codes of the enrolment and of the daemon. With STUB_WAIT the daemon runs until SIGTERM, and then
# drains until the file `drained` is there.
cat >"$scratch/bin/ravel-worker" <<'STUB'
#!/usr/bin/env bash
echo "$*" >>"$SCRATCH/commands"
if [[ $1 == join ]]; then
  work=$(sed 's/.*--work-dir \([^ ]*\).*/\1/' <<<"$*")
  cat >"$work/identity"
  [[ ! -e $SCRATCH/hold ]] || { touch "$SCRATCH/joining"; until [[ -e $SCRATCH/joined ]]; do sleep 0.02; done; }
  exit "${STUB_JOIN:-0}"
fi
trap 'echo TERM >>"$SCRATCH/signals"; stopped=1' TERM
echo $$ >"$SCRATCH/daemon"
stopped=0
if [[ -n ${STUB_WAIT:-} ]]; then
  until [[ $stopped == 1 && -e $SCRATCH/drained ]]; do sleep 0.02; done
fi
exit "${STUB_EXIT:-0}"
STUB
chmod +x "$scratch/bin/srun" "$scratch/bin/ravel-worker"
echo "token of this test" >"$scratch/token"

start() {
  rm -rf "$scratch"/{commands,daemon,drained,hold,joined,joining,signals,task} "$scratch"/tmp/*
  [[ $1 != hold ]] || { touch "$scratch/hold"; shift; }
  env "$@" SCRATCH="$scratch" PATH="$scratch/bin:$PATH" TMPDIR="$scratch/tmp" SLURM_JOB_ID=17 RAVEL_COORDINATOR=alpha:7070 \
    RAVEL_TOKEN_FILE="$scratch/token" bash "$script" >"$scratch/out" 2>&1 &
  job=$!
}
until_there() {
  local tries=0
  until [[ -s $scratch/$1 || ( -e $scratch/$1 && ${2:-} == empty ) ]]; do
    tries=$((tries + 1))
    [[ $tries -lt 500 ]] || { echo "slurm_test.sh: no $1 after 10 s" >&2; cat "$scratch/out" >&2; kill "$job"; exit 1; }
    sleep 0.02
  done
}
# Counts the signals that the daemon got until there are so many.
until_signals() {
  local tries=0
  until [[ $(grep -c . "$scratch/signals" 2>/dev/null) -ge $1 || $tries -ge 250 ]]; do tries=$((tries + 1)); sleep 0.02; done
}
# The end of the case $1: its code must be $2, and nothing of it may be left.
ends() {
  local code=0 left
  wait "$job" || code=$?
  left=$(ls -A "$scratch/tmp")
  if [[ $code == "$2" && -z $left ]]; then
    echo "ok: $1"
  else
    echo "FAILED: $1: code $code, expected $2; left behind: ${left:-nothing}; $(cat "$scratch/out")"
    failed=1
  fi
}
expect() {
  local what=$1
  shift
  "$@" || { echo "FAILED: $what"; failed=1; }
}

start STUB_EXIT=0
ends "a daemon that ends" 0
start STUB_EXIT=93
ends "a daemon that fails" 93
start STUB_JOIN=3
ends "an enrolment that is refused" 3
expect "no daemon without an identity" test ! -e "$scratch/daemon"

start STUB_WAIT=1
until_there daemon
kill -KILL "$(<"$scratch/daemon")"
ends "a daemon that is killed" 137

start STUB_WAIT=1 RAVEL_ROOTS='--read-root /data --write-root /scratch' RAVEL_DATA_CACHE='/nodes own'
until_there daemon
kill -TERM "$(<"$scratch/task")"
until_signals 1
touch "$scratch/drained"
ends "SIGTERM, then a drain that saves" 0
expect "the daemon gets SIGTERM" test "$(sort -u "$scratch/signals" 2>/dev/null)" = TERM
expect "the roots and the cache are passed on" grep -q -- '--read-root /data --write-root /scratch --data-cache /nodes own$' "$scratch/commands"
expect "the token is on no command line" bash -c "! grep -q 'token of' '$scratch/commands'"
limit=$(sed -n 's/.*--drain-limit \([0-9]*\)s .*/\1/p' "$scratch/commands")
expect "a drain of ${limit:-no} s is shorter than KillWait" test "${limit:-$kill_wait_s}" -lt $kill_wait_s

start STUB_WAIT=1 STUB_EXIT=9 RAVEL_DRAIN_LIMIT=100s
until_there daemon
kill -TERM "$(<"$scratch/task")"
until_signals 1
kill -TERM "$(<"$scratch/task")"
until_signals 2
expect "a second SIGTERM does not end the drain" kill -0 "$(<"$scratch/daemon")"
touch "$scratch/drained"
ends "two signals, the time's end after its notice" 9
expect "a site's own limit" grep -q -- '--drain-limit 100s' "$scratch/commands"

start hold STUB_WAIT=1
until_there joining empty
kill -TERM "$(<"$scratch/task")"
touch "$scratch/joined"
ends "SIGTERM during the enrolment" 0
expect "no daemon after that" test ! -e "$scratch/daemon"

exit $failed
