#!/usr/bin/env bash
# Makes build/moto_venv with moto's S3 server from PyPI, against which common/store's S3 is tested.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
venv=build/moto_venv
if [[ ! -x $venv/bin/moto_server ]]; then
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet 'moto[server,s3]>=5,<6'
fi
"$venv/bin/pip" show moto | sed -n "s/^Version: /moto /p"
