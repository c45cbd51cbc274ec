#!/usr/bin/env bash
# Makes the virtual environment of the interop tests and benchmark peers: torch, transformers, accelerate, safetensors, tokenizers.
# RAVEL_INTEROP_VENV names another place than build/interop-venv. Needs PyPI; never used by the service or by CI.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
venv=${RAVEL_INTEROP_VENV:-$PWD/build/interop-venv}
if [[ ! -x $venv/bin/python ]]; then
  python3 -m venv "$venv"
fi
"$venv/bin/python" - <<'PYTHON' 2>/dev/null || "$venv/bin/pip" install --quiet numpy torch transformers accelerate safetensors tokenizers
import accelerate, numpy, safetensors, tokenizers, torch, transformers
PYTHON
"$venv/bin/python" - <<'PYTHON'
import torch, transformers
print("torch", torch.__version__, "transformers", transformers.__version__)
PYTHON
echo "$venv"
