#!/usr/bin/env bash
# Installs the Debian packages of the named groups of deploy/packages.txt that are missing; needs root only then.
#   deploy/install_packages.sh build [test] [tidy]
set -euo pipefail
list="$(dirname "${BASH_SOURCE[0]}")/packages.txt"

missing=()
for group in "$@"; do
  mapfile -t packages < <(awk -v group="$group" '$1 == group { print $2 }' "$list")
  if [[ ${#packages[@]} == 0 ]]; then
    echo "install_packages.sh: no group '$group' in $list" >&2
    exit 2
  fi
  installed=$(dpkg-query -W -f '${Package} ${db:Status-Status}\n' "${packages[@]}" 2>/dev/null |
    awk '$2 == "installed" { print $1 }' || true)
  for package in "${packages[@]}"; do
    grep -qxF -- "$package" <<<"$installed" || missing+=("$package")
  done
done
if [[ ${#missing[@]} == 0 ]]; then
  exit 0
fi

if [[ $(id -u) != 0 ]]; then
  echo "Missing packages; as root: apt-get install --no-install-recommends ${missing[*]}" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
retries=(-o Acquire::Retries=5)
install=(apt-get "${retries[@]}" install -y -qq --no-install-recommends "${missing[@]}")
echo "installing ${#missing[@]} packages: ${missing[*]}"
log=$(mktemp)
made=()
trap 'rm -f "$log" "${made[@]}"' EXIT
# Services that packages bring are not started, now or at boot: tests start the servers that they need.
if [[ ! -e /usr/sbin/policy-rc.d ]]; then
  made=(/usr/sbin/policy-rc.d)
  printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
  chmod +x /usr/sbin/policy-rc.d
fi
# The lists of a machine that installed something lately are good enough; a fresh or stale one needs an update first.
if ! "${install[@]}" >"$log" 2>&1; then
  if ! { apt-get "${retries[@]}" update -qq && "${install[@]}"; } >"$log" 2>&1; then
    cat "$log" >&2
    exit 1
  fi
fi
for package in "${missing[@]}"; do
  mapfile -t units < <(dpkg-query -L "$package" | sed -n 's,^/lib/systemd/system/\(swift-[a-z-]*\.service\)$,\1,p')
  [[ ${#units[@]} == 0 ]] || systemctl disable --quiet "${units[@]}" || true
done
