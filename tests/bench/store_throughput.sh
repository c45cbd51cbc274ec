#!/usr/bin/env bash
# ravel-store over loopback against dd with O_DIRECT on the same disk, in pairs.
#   tests/bench/store_throughput.sh BIN_DIR FOLDER [MEGABYTES] [PAIRS]
# FOLDER lies on the disk to measure. CPU seconds of the store come from /proc.
set -euo pipefail
bin=$1 folder=$(mkdir -p "$2" && cd "$2" && pwd) megabytes=${3:-512} pairs=${4:-5}
work=$(mktemp -d "$folder/throughput.XXXXXX")
"$bin/ravel-store" --dev-loopback --listen 127.0.0.1:0 --port-file "$work/port" --data "$work/data" --min-free 0 \
  >"$work/log" 2>&1 &
store=$!
trap 'kill "$store" 2>/dev/null; wait "$store" 2>/dev/null; rm -rf "$work"' EXIT
while [[ ! -s $work/port ]]; do
  kill -0 "$store" || { cat "$work/log"; exit 1; }
  read -r -t 0.1 <> <(:) || true
done
cpu() { awk -v hertz="$(getconf CLK_TCK)" '{ print ($14 + $15) / hertz }' "/proc/$store/stat"; }
for ((pair = 1; pair <= pairs; ++pair)); do
  direct=$(dd if=/dev/zero of="$work/direct" bs=8M count=$((megabytes / 8)) oflag=direct conv=fdatasync 2>&1 |
    awk -F, '/copied/ { split($(NF - 1), s, " "); print s[1] }')
  rm -f "$work/direct"
  before=$(cpu)
  line=$("$bin/store_throughput" "ravel://127.0.0.1:$(<"$work/port")/bench" $((megabytes * 1024 * 1024)))
  echo "$line" | awk -v pair="$pair" -v mb="$megabytes" -v direct="$direct" -v used="$(cpu)" -v before="$before" '
    { match($0, /"write_mb_s": [0-9.]+/); write = substr($0, RSTART + 14, RLENGTH - 14)
      mbs = mb * 1.048576 / direct
      printf "{\"pair\": %d, \"dd_mb_s\": %.1f, \"write_ratio\": %.2f, \"server_write_read_cpu_s_gb\": %.3f, \"client\": %s}\n",
        pair, mbs, write / mbs, (used - before) * 1000 / (mb * 1.048576), $0 }'
done
