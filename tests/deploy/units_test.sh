#!/usr/bin/env bash
# The systemd units parse, and are as confined as they say (systemd-analyze security; 0 is the best, 10 the worst).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if ! command -v systemd-analyze >/dev/null; then
  [[ ,${RAVEL_REQUIRE:-}, != *,systemd,* ]] || { echo "units_test.sh: no systemd-analyze here; RAVEL_REQUIRE lists systemd" >&2; exit 1; }
  echo "units_test.sh: skipped: no systemd-analyze here"
  exit 0
fi
check() {
  local unit=deploy/systemd/$1.service most=$2 said
  said=$(systemd-analyze verify --man=no "$unit" 2>&1 | grep -v "Command /usr/bin/$1 is not executable" || true)
  [[ -z $said ]] || { echo "$said" >&2; exit 1; }
  systemd-analyze security --offline=true --no-pager --threshold="$most" "$unit" | tail -1
}
check ravel-coordinator 20
check ravel-worker 40
check ravel-store 40

# The worker's unit with the drop-in that runs trainers as another user.
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cp deploy/systemd/ravel-worker.service "$folder/"
mkdir "$folder/ravel-worker.service.d"
cp deploy/systemd/ravel-worker-trainer-user.conf "$folder/ravel-worker.service.d/trainer-user.conf"
said=$(systemd-analyze verify --man=no "$folder/ravel-worker.service" 2>&1 | grep -v "Command /usr/bin/ravel-worker is not executable" || true)
[[ -z $said ]] || { echo "$said" >&2; exit 1; }
