#!/usr/bin/env bash
# Unpacks promtool and, beside it, prometheus of Debian's package `prometheus` into build/promtool, and prints promtool's path
# last. Nothing is installed: the package would start a server.
#   tests/deploy/promtool.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder=$PWD/build/promtool
program=$folder/usr/bin/promtool
if [[ ! -x $program ]]; then
  mkdir -p "$folder"
  cd "$folder"
  # The lists of a machine that installed something lately are good enough.
  retries=(-o Acquire::Retries=5)
  apt-get "${retries[@]}" download -qq prometheus >/dev/null 2>&1 ||
    { apt-get "${retries[@]}" update -qq && apt-get "${retries[@]}" download -qq prometheus >/dev/null; }
  dpkg -x prometheus_*.deb .
  rm -f prometheus_*.deb
fi
echo "$program"
