#!/usr/bin/env bash
# ravel-store over loopback against dd with O_DIRECT on the same disk, in pairs: writing, and reading back.
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
# Its arguments are dd's; prints seconds.
seconds_of_dd() { dd bs=8M "$@" 2>&1 | awk -F, '/copied/ { split($(NF - 1), s, " "); print s[1] }'; }
cpu() { awk -v hertz="$(getconf CLK_TCK)" '{ print ($14 + $15) / hertz }' "/proc/$store/stat"; }
for ((pair = 1; pair <= pairs; ++pair)); do
  direct=$(seconds_of_dd if=/dev/zero of="$work/direct" count=$((megabytes / 8)) oflag=direct conv=fdatasync)
  back=$(seconds_of_dd if="$work/direct" of=/dev/null iflag=direct)
  rm -f "$work/direct"
  before=$(cpu)
  line=$("$bin/store_throughput" "ravel://127.0.0.1:$(<"$work/port")/bench" $((megabytes * 1024 * 1024)))
  echo "$line" | awk -v pair="$pair" -v mb="$megabytes" -v direct="$direct" -v back="$back" -v used="$(cpu)" -v before="$before" '
    { match($0, /"write_mb_s": [0-9.]+/); write = substr($0, RSTART + 14, RLENGTH - 14)
      match($0, /"read_mb_s": [0-9.]+/); read = substr($0, RSTART + 13, RLENGTH - 13)
      mbs = mb * 1.048576 / direct
      rmbs = mb * 1.048576 / back
      printf "{\"pair\": %d, \"dd_mb_s\": %.1f, \"write_ratio\": %.2f, \"dd_read_mb_s\": %.1f, \"read_ratio\": %.2f, \"server_write_read_cpu_s_gb\": %.3f, \"client\": %s}\n",
        pair, mbs, write / mbs, rmbs, read / rmbs, (used - before) * 1000 / (mb * 1.048576), $0 }'
done
