#!/usr/bin/env bash
# Looks at the file system of an image (deploy/images/build.sh): its size, that a package of its SBOM brought each shared library, and
# that no file is set-id. Then a whole Ravel runs inside, as the image's user, with a read-only root: text is prepared, a job trains on
# one worker, its export and a sample are made. With BIN, the programs it was made of, the image is built again, to the same digest.
# An image with libravel_cuda.so: NVIDIA's libraries have versions and licences, open inside, and the worker says that there is no
# driver. Its second build needs CUDA, the folder that its libraries came from. Needs root, for namespaces.
#   tests/deploy/image_test.sh build/images/cpu/root [BIN]
#   tests/deploy/image_test.sh build/images/cuda/root [BIN CUDA]
set -euo pipefail
root=$(cd "${1:?usage: image_test.sh ROOT [BIN [CUDA]]}" && pwd)
bin=${2:+$(realpath "$2")}
cuda=${3:-}
has_cuda=false
[[ ! -f $root/usr/bin/libravel_cuda.so ]] || has_cuda=true
repository=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../..")
inside=$(mktemp -d)
trap 'rmdir "$inside"' EXIT

size=$(du -sb "$root" | cut -f1)
echo "size $((size / 1000000)) MB"
allowed=120
! $has_cuda || allowed=1600
[[ $size -lt ${allowed}000000 ]] || { echo "image_test.sh: larger than $allowed MB" >&2; exit 1; }

# NVIDIA's libraries that the SBOM lists with a licence whose text it has, as lines of sha256sum.
nvidia_libraries() {
  jq -r '[.hasExtractedLicensingInfos[]? | select(.extractedText | length > 500).licenseId] as $known | .packages[] |
    select(.supplier == "Organization: NVIDIA" and (.versionInfo | test("^[0-9]+[.][0-9.]+$")) and (.licenseDeclared | IN($known[]))) |
    .checksums[0].checksumValue + "  " + .packageFileName' usr/share/ravel/sbom.spdx.json
}

# Shared libraries that no package of the SBOM brought, or that are not as it brought them.
foreign_libraries() {
  local sbom=usr/share/ravel/sbom.spdx.json nvidia
  cd "$root"
  nvidia=$(nvidia_libraries)
  [[ -z $nvidia ]] || sha256sum --check --quiet <<<"$nvidia" 2>&1
  find . -type f \( -name '*.so' -o -name '*.so.[0-9]*' \) ! -path ./usr/bin/libravel_cuda.so -exec md5sum {} + |
    awk -v names="$(jq -r '.packages[] | .name + "=" + .versionInfo' "$sbom")" -v nvidia="$(awk '{ print $2 }' <<<"$nvidia")" '
      BEGIN {
        split(names, lines, "\n")
        for (i in lines) listed[lines[i]] = 1
        split(nvidia, lines, "\n")
        for (i in lines) listed[lines[i]] = 1
      }
      FILENAME != "-" && FILENAME ~ /md5sums$/ { owner[$1 " ./" $2] = FILENAME; next }
      FILENAME != "-" { if ($1 == "Package:") package = $2; if ($1 == "Version:") version[FILENAME ".md5sums"] = package "=" $2; next }
      {
        of = owner[$1 " " $2]
        if (!(of in version && version[of] in listed) && !($2 in listed)) print $2
      }' var/lib/dpkg/status.d/* -
}
foreign=$(foreign_libraries)
[[ -z $foreign ]] || { echo "image_test.sh: of no package in the SBOM, or changed:" "$foreign" >&2; exit 1; }
echo "ok: $(find "$root" -type f \( -name '*.so' -o -name '*.so.[0-9]*' \) | wc -l) shared libraries, all of packages in the SBOM"
set_id=$(find "$root" -xdev ! -type l -perm /6000)
[[ -z $set_id ]] || { echo "image_test.sh: set-id:" "$set_id" >&2; exit 1; }

if [[ -n $bin ]]; then
  again=$(mktemp -d)
  (cd "$repository" && deploy/images/build.sh --bin "$bin" ${cuda:+--cuda "$cuda"} --output "$again/image") >"$again/log" || { cat "$again/log" >&2; exit 1; }
  digests=$(jq -r '.manifests[0].digest' "$root/../oci/index.json" "$again/image/oci/index.json" | sort -u)
  [[ $digests == sha256:* && $(wc -l <<<"$digests") == 1 ]] ||
    { echo "image_test.sh: two builds differ (the second is kept in $again):" "$digests" >&2; exit 1; }
  rm -rf "$again"
  echo "ok: a second build has the digest $digests"
fi

cat >"/tmp/ravel-image-job.$$" <<'JOB'
set -eu
cd /var/lib/ravel
coordinator='' worker=''
trap 'kill $coordinator $worker 2>/dev/null || true' EXIT
if (: >/usr/probe) 2>/dev/null; then echo "the root can be written" >&2; exit 1; fi
[ "$(id -u)" = 10001 ]
ravelctl data prepare --input /usr/share/common-licenses/GPL-3 --tokenizer train-bpe:400 --output tokens >prepare.log
cat >job.yaml <<'YAML'
apiVersion: ravel/v1
kind: TrainingJob
metadata: {name: image}
spec:
  model: {config: {modelType: llama, vocabSize: 400, hiddenSize: 64, intermediateSize: 128, numHiddenLayers: 2, numAttentionHeads: 4,
                   numKeyValueHeads: 2, maxPositionEmbeddings: 64}}
  data: {train: [{path: /var/lib/ravel/tokens}], sequenceLength: 64}
  training: {steps: 40, globalBatch: 8, optimizer: {lr: 1e-2}}
  devices: {kind: cpu, count: 1}
  checkpoint: {store: file:///var/lib/ravel/checkpoints, everySteps: 20}
YAML
ravel-coordinator --dev-loopback --listen 127.0.0.1:0 --state-dir state --port-file port >coordinator.log 2>&1 &
coordinator=$!
tries=0
until [ -s port ]; do
  tries=$((tries + 1))
  if [ $tries -gt 600 ] || ! kill -0 $coordinator; then cat coordinator.log >&2; exit 1; fi
  sleep 0.1
done
export RAVEL_COORDINATOR=127.0.0.1:$(cat port)
ravel-worker --dev-loopback --coordinator "$RAVEL_COORDINATOR" --node-id image --work-dir worker >worker.log 2>&1 &
worker=$!
# Only a node can look for the tokenizer beside the data.
until case $(ravelctl nodes list -o json) in *READY*) true ;; *) false ;; esac; do
  tries=$((tries + 1))
  if [ $tries -gt 600 ] || ! kill -0 $worker; then cat worker.log >&2; exit 1; fi
  sleep 0.1
done
# An image with CUDA, on a machine without a driver.
if [ -f /usr/bin/libravel_cuda.so ]; then
  nodes=$(ravelctl nodes list)
  case $nodes in *'no driver: libnvidia-ml.so.1 not found'*) ;; *) echo "$nodes" >&2; exit 1 ;; esac
  for library in libcublasLt.so.13 libcudnn.so.9 libnccl.so.2 libnvrtc.so.13; do
    LD_PRELOAD=$library /bin/true 2>preload.log && [ ! -s preload.log ] || { cat preload.log >&2; exit 1; }
  done
fi
ravelctl submit -f job.yaml --follow || { cat worker.log coordinator.log >&2; exit 1; }
ravelctl checkpoints export checkpoints/image/step-0000000040 --output hf
ravelctl generate --checkpoint checkpoints/image/step-0000000040 --prompt 'the license' >sample
[ -s sample ] && [ -s hf/config.json ]
kubectl-ravel get image
[ -x /usr/bin/ravel-pool ]
kill $worker $coordinator
wait
JOB

# The namespace's own mounts go with it.
unshare --mount bash -euc '
  root=$1 inside=$2
  mount --make-rprivate /
  mount --bind "$root" "$inside"
  mount -o remount,bind,ro "$inside"
  mount --rbind /proc "$inside/proc"
  mount -t tmpfs -o mode=755 dev "$inside/dev"
  for device in null zero full random urandom; do touch "$inside/dev/$device"; mount --bind "/dev/$device" "$inside/dev/$device"; done
  mkdir "$inside/dev/shm"
  mount -t tmpfs -o mode=1777 shm "$inside/dev/shm"
  mount -t tmpfs -o mode=1777 tmp "$inside/tmp"
  mount -t tmpfs -o mode=700,uid=10001,gid=10001 state "$inside/var/lib/ravel"
  cp "$3" "$inside/tmp/job.sh"
  chmod 644 "$inside/tmp/job.sh"
  exec env -i PATH=/usr/bin:/bin HOME=/var/lib/ravel /usr/sbin/chroot --userspec=10001:10001 "$inside" /bin/sh /tmp/job.sh
' image_test "$root" "$inside" "/tmp/ravel-image-job.$$" && status=0 || status=$?
rm -f "/tmp/ravel-image-job.$$"
[[ $status == 0 ]] && echo "ok: the job ran inside the image"
exit $status
