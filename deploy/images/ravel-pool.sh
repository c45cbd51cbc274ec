#!/bin/sh
# A pod of a pool that lives for one job (deploy/kubernetes/overlays/jobset and trainer-runtime).
#   ravel-pool coordinator JOB_FILE   a coordinator, the job, its progress; ends with the code of `ravelctl submit --follow`
#   ravel-pool worker                 a node, by the token that the coordinator leaves in the shared volume
#   ravel-pool node JOB_FILE          both in the pod of index 0, a worker in the others
# RAVEL_POOL: the pool's name and the UUID by which its job is submitted once; RAVEL_COORDINATOR: the coordinator's HOST:PORT;
# RAVEL_NODE: this pod's name, which no other pod has had. State is in RAVEL_POOL_STATE, a volume of this pod; the token is below
# RAVEL_POOL_SHARED, a volume of all, beneath which the job may name paths, and nowhere else. A coordinator that starts again on its state (RAVEL_POOL_COORDINATOR) goes on with its job.
set -eu
umask 077

usage() {
  echo "usage: ravel-pool coordinator|node JOB_FILE, or ravel-pool worker" >&2
  exit 2
}
role=${1:-} job=${2:-}
: "${RAVEL_POOL:?the UUID of this pool}" "${RAVEL_COORDINATOR:?HOST:PORT of its coordinator}"
state=${RAVEL_POOL_STATE:-/var/lib/ravel}
tokens=${RAVEL_POOL_SHARED:-/shared}/.ravel-pools
token=$tokens/$RAVEL_POOL
mkdir -p "$state" "$tokens"
host=${RAVEL_COORDINATOR%:*} port=${RAVEL_COORDINATOR##*:}
coordinator_state=${RAVEL_POOL_COORDINATOR:-$state/coordinator}

# Waits for a command to hold, or for the process $1 to end. A stopped pod does not wait.
until_ready() {
  process=$1
  shift
  until "$@"; do
    kill -0 "$process" 2>/dev/null || { wait "$process"; return 1; }
    sleep 0.2
  done
}

run_coordinator() {
  [ -e "$coordinator_state/tls" ] ||
    ravel-coordinator init --state-dir "$coordinator_state" --name "$host,localhost" >&2
  rm -f "$state/port"
  ravel-coordinator --state-dir "$coordinator_state" --listen "${RAVEL_POOL_LISTEN:-[::]}:$port" --port-file "$state/port" &
  coordinator=$!
  trap 'kill $coordinator 2>/dev/null || true; wait $coordinator || true; rm -f "$token"' EXIT
  trap 'exit 143' TERM INT
  until_ready $coordinator test -s "$state/port"
  export RAVEL_CONTEXT="$coordinator_state/admin.context.json"
  ravelctl enrol node --uses "${RAVEL_POOL_NODES:-64}" --ttl 24h >"$token.new"
  mv "$token.new" "$token"
  code=0
  ravelctl submit -f "$job" --request-id "$RAVEL_POOL" --follow || code=$?
  return $code
}

# A pod that is evicted lets the job save and go on (--drain-limit). It ends by 143, so that it is replaced.
run_worker() {
  : "${RAVEL_NODE:?a name that no pod had before}"
  until [ -s "$token" ]; do sleep 0.5; done
  [ -e "$state/worker/identity" ] ||
    ravel-worker join --coordinator "$RAVEL_COORDINATOR" --node-id "$RAVEL_NODE" --work-dir "$state/worker" - <"$token"
  stopped=0
  ravel-worker --work-dir "$state/worker" --cpu-devices "${RAVEL_POOL_CPU_DEVICES:-1}" --drain-limit "${RAVEL_POOL_DRAIN:-9m}" \
    --write-root "${RAVEL_POOL_SHARED:-/shared}" --data-cache-bytes "${RAVEL_POOL_DATA_CACHE:-5GiB}" &
  worker=$!
  trap 'stopped=1; kill -TERM $worker' TERM INT
  code=0
  while kill -0 $worker 2>/dev/null; do
    wait $worker && code=0 || code=$?
  done
  [ $stopped = 0 ] || return 143
  return $code
}

case $role in
  coordinator) [ -n "$job" ] || usage; run_coordinator ;;
  worker) run_worker ;;
  node)
    [ -n "$job" ] || usage
    if [ "${JOB_COMPLETION_INDEX:?of an Indexed Job}" = 0 ]; then
      run_worker &
      run_coordinator
    else
      run_worker
    fi
    ;;
  *) usage ;;
esac
