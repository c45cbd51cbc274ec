#!/usr/bin/env bash
# Trains a small Llama on a real English text with a whole Ravel on this machine: one coordinator and N worker daemons on
# loopback, as separate processes. Exit status 0 means that the job succeeded and that the model has learned something.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  cat >&2 <<'TEXT'
usage: deploy/quickstart.sh [options]
  --workers N                worker daemons, one CPU device each (default 2)
  --steps N                  optimizer steps (default: those of deploy/examples/quickstart.yaml)
  --kill-one                 kills a worker daemon with SIGKILL half-way
  --keep                     leaves everything running at the end and says how to use it
  --corpus bible|linux-doc   the text (default bible)
  --compute fp32|bf16|fp16   type of weights and activations (default fp32); fp16 scales the loss
  --recipe NAME              quantizes layers, in bf16: fp8_tensor (delayed scales), fp8_current, fp8_block (of a wider model,
                             whose matrices have whole blocks), mxfp8 or nvfp4 (default none)
  --state TYPE               of the optimizer's moments: fp32, bf16, fp8, or two of them such as fp8,bf16 (default fp32)
  --tensor T                 workers that share each layer, a power of two that divides N (default 1)
  --tensor-parts P           parts of the sums that they could split, up to 8: runs of equal P have equal losses, whatever T
                             (default T; above 2 of a wider model, whose heads they divide)
  --sequence-parallel        of these workers each has its own tokens alone between products: the same losses, fewer
                             activations
  --offload F                part of that state that lies in files of the workers, from 0 to 1 (default: none)
  --cuda                     also builds libravel_cuda.so (needs nvcc)
Where RAVEL_BIN_DIR names a folder of built programs, nothing is installed or built.
TEXT
  exit 2
}

# A whole number above zero, or usage.
number() {
  [[ ${2:-} =~ ^[1-9][0-9]{0,5}$ ]] || { echo "quickstart.sh: $1 wants a number above 0, not '${2:-}'" >&2; usage; }
  echo "$2"
}

workers=2 steps='' kill_one=no keep=no corpus=bible preset=dev compute=fp32 state_type=fp32 recipe='' offload='' tensor=1 parts=''
sequence=false
while [[ $# -gt 0 ]]; do
  case $1 in
    --workers) workers=$(number "$1" "${2:-}"); shift ;;
    --steps) steps=$(number "$1" "${2:-}"); shift ;;
    --kill-one) kill_one=yes ;;
    --keep) keep=yes ;;
    --corpus) corpus=${2:-}; shift ;;
    --compute) compute=${2:-}; shift ;;
    --recipe) recipe=${2:-}; shift; compute=bf16 ;;
    --state) state_type=${2:-}; shift ;;
    --tensor) tensor=$(number "$1" "${2:-}"); shift ;;
    --tensor-parts) parts=$(number "$1" "${2:-}"); shift ;;
    --sequence-parallel) sequence=true ;;
    --offload) offload=${2:-}; shift ;;
    --cuda) preset=cuda ;;
    *) usage ;;
  esac
  shift || usage
done
[[ $corpus == bible || $corpus == linux-doc ]] || usage
[[ $compute =~ ^(fp32|bf16|fp16)$ ]] || usage
[[ $recipe =~ ^(|fp8_tensor|fp8_current|fp8_block|mxfp8|nvfp4)$ ]] || usage
[[ $state_type =~ ^(fp32|bf16|fp8)(,(fp32|bf16|fp8))?$ ]] || usage
[[ $offload =~ ^(|0|1|0\.[0-9]+)$ ]] || usage
parts=${parts:-$tensor}
[[ $tensor =~ ^(1|2|4|8)$ && $parts =~ ^(1|2|4|8)$ ]] || usage
if ((workers % tensor != 0 || parts % tensor != 0)); then
  echo "quickstart.sh: --tensor $tensor must divide --workers $workers and --tensor-parts $parts" >&2
  exit 2
fi
if [[ $sequence == true && $tensor == 1 ]]; then
  echo "quickstart.sh: --sequence-parallel needs --tensor 2 or more" >&2
  exit 2
fi
if [[ $kill_one == yes && $workers == "$tensor" ]]; then
  echo "quickstart.sh: --kill-one needs at least $((2 * tensor)) workers" >&2
  exit 2
fi

example=deploy/examples/quickstart.yaml
root=$PWD/build/quickstart
data=$root/$corpus
run=$root/run-$(date +%Y%m%d-%H%M%S)-$$
bin=${RAVEL_BIN_DIR:-$PWD/build/$preset/bin}
say() { printf '\n== %s\n' "$*"; }

started=()
# shellcheck disable=SC2317  # called by the trap
stop_all() {
  local pid
  for pid in ${started[@]+"${started[@]}"}; do kill -TERM "$pid" 2>/dev/null || true; done
  for pid in ${started[@]+"${started[@]}"}; do
    timeout 10 tail --pid="$pid" -f /dev/null 2>/dev/null || kill -KILL "$pid" 2>/dev/null || true
  done
  started=()
}
trap stop_all EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Starts a program in a session of its own, so that Ctrl-C reaches this script first; $! is its process.
start() {
  local log=$1
  shift
  setsid "$@" >"$log" 2>&1 </dev/null &
  started+=($!)
  disown  # no notice when it is killed
}
ctl() { "$bin/ravelctl" --coordinator "$address" "$@"; }
# The value of a field of the job: text or number.
job_field() { ctl get quickstart -o json | sed -n "s/^  \"$1\": *\"\{0,1\}\([^\",]*\).*/\1/p" | head -1; }
# A number of the job file.
example_value() { sed -n "s/.*\b$1: *\([0-9][0-9]*\).*/\1/p" "$example" | head -1; }

mkdir -p "$run" build/logs
if [[ -z ${RAVEL_BIN_DIR:-} ]]; then
  say "Packages and build"
  deploy/install_packages.sh build
  cmake --preset "$preset" -DRAVEL_UNITY=ON >build/logs/quickstart-configure.log || { cat build/logs/quickstart-configure.log; exit 1; }
  cmake --build --preset "$preset" --target ravel-coordinator ravel-worker ravel-trainer ravelctl
fi

say "Text: $corpus"
deploy/corpus.sh "$corpus" "$data/text"
cat "$data/text/LICENCE"
vocabulary=$(example_value vocabSize)
tokens=$data/tokens-$vocabulary
if [[ ! -e $tokens.idx ]]; then
  "$bin/ravelctl" data prepare --input "$data"/text/*.txt --tokenizer "train-bpe:$vocabulary" \
    --validation-fraction 0.02 --output "$tokens"
fi
# What a model can reach that knows only how frequent each token is, in nats.
entropy=$(od -An -v -tu2 "$tokens.bin" | awk '
  { for (i = 1; i <= NF; ++i) { ++count[$i]; ++total } }
  END { for (id in count) { p = count[id] / total; entropy -= p * log(p) } printf "%.4f", entropy }')
echo "$(($(stat -c %s "$tokens.bin") / 2)) tokens; unigram entropy $entropy nats"

say "One coordinator and $workers workers on loopback"
start "$run/coordinator.log" "$bin/ravel-coordinator" --dev-loopback --listen 127.0.0.1:0 \
  --state-dir "$run/state" --port-file "$run/port"
for ((i = 0; i < 200; ++i)); do
  [[ -s $run/port ]] && break
  kill -0 "${started[0]}" 2>/dev/null || { cat "$run/coordinator.log" >&2; exit 1; }
  sleep 0.05
done
address=127.0.0.1:$(cat "$run/port")
for ((i = 0; i < workers; ++i)); do
  start "$run/worker-$i.log" "$bin/ravel-worker" --dev-loopback --coordinator "$address" --node-id "worker-$i" \
    --cpu-devices 1 --work-dir "$run/worker-$i"
done
for ((i = 0; i < 200; ++i)); do
  ready=$(ctl nodes list -o json 2>/dev/null | grep -c '"READY"' || true)
  [[ $ready == "$workers" ]] && break
  sleep 0.05
done
ctl nodes list
[[ $ready == "$workers" ]] || { echo "quickstart.sh: only $ready of $workers workers are ready; see $run" >&2; exit 1; }

say "Training"
lanes=8
while ((lanes < workers)); do lanes=$((lanes * 2)); done
batch=$(example_value globalBatch)
((batch % lanes == 0)) || batch=$lanes
steps=${steps:-$(example_value steps)}
warmup=$(example_value warmupSteps)
((warmup < steps)) || warmup=$((steps / 10))
job=$run/job.yaml
precision="compute: $compute"
case $recipe in
  '') ;;
  fp8_current) precision+=', recipe: fp8_tensor, scaling: current' ;;
  *) precision+=", recipe: $recipe" ;;
esac
hidden=192 heads=6 key_heads=2
[[ $recipe != fp8_block && $parts -le 2 ]] || { hidden=256 heads=8 key_heads=4; }
[[ $recipe != fp8_block || $parts == 1 ]] || { hidden=512 heads=4 key_heads=4; }  # parts of whole blocks of 128
optimizer="stateDtype: '$state_type', "
if [[ -n $offload ]]; then
  mkdir -p "$run/offload"
  optimizer+="offload: {fraction: $offload, path: '$run/offload'}, "
fi
sed -e "s#/var/tmp/ravel-quickstart/tokens#$tokens#" \
  -e "s#/var/tmp/ravel-quickstart#$run#" \
  -e "s#corpus: bible#corpus: $corpus#" \
  -e "s#^    steps: [0-9]*#    steps: $steps#" \
  -e "s#warmupSteps: [0-9]*#warmupSteps: $warmup#" \
  -e "s#globalBatch: [0-9]*#globalBatch: $batch#" \
  -e "s#count: [0-9]*#count: $workers#" \
  -e "s#^    optimizer: {#    optimizer: {$optimizer#" \
  -e "s#^  devices: {#  precision: {$precision}\n  parallelism: {tensor: $tensor, sequenceParallel: $sequence}\n&#" \
  -e "s#min: [0-9]*, max: [0-9]*#min: $tensor, max: $workers#" \
  -e "s#hiddenSize: [0-9]*#hiddenSize: $hidden#" \
  -e "s#numAttentionHeads: [0-9]*#numAttentionHeads: $heads#" \
  -e "s#numKeyValueHeads: [0-9]*#numKeyValueHeads: $key_heads#" \
  -e "s#virtualRanks: [0-9]*#virtualRanks: $lanes, tensorParts: $parts#" "$example" >"$job"

if [[ $kill_one == yes ]]; then
  victim=${started[-1]}
  # Half-way the last worker dies without a word.
  (
    trap - EXIT INT TERM
    while step=$(job_field step 2>/dev/null || echo 0); ((${step:-0} < steps / 2)); do sleep 0.2; done
    echo "quickstart.sh: kill -9 of worker-$((workers - 1)) at step $step" >&2
    kill -KILL "$victim"
  ) &
  watcher=$!
  started+=("$watcher")
fi
ctl plan -f "$job" | grep -E '^(recipe|gemm path) ' || true
follow=0
ctl submit -f "$job" --follow || follow=$?
((follow == 0 || follow > 6)) || exit "$follow"

say "Result"
ctl get quickstart
ctl describe quickstart | grep '^Gemm path' || true
state=$(job_field state)
mapfile -t losses < <(ctl metrics quickstart -o jsonl | sed -n 's/.*"loss": *\([-0-9.e]*\).*/\1/p')
first=${losses[0]:-} last=${losses[-1]:-}
speed=$(ctl metrics quickstart -o jsonl | sed -n 's/.*"tokens_per_second": *\([-0-9.e]*\).*/\1/p' | sort -g |
  awk '{ value[NR] = $1 } END { printf "%.0f", value[int((NR + 1) / 2)] }')
checkpoint=$(job_field committedPath)
echo "first loss        $first"
echo "last loss         $last    (unigram entropy $entropy)"
echo "tokens per second $speed    (median of the steps)"
if [[ $compute == fp16 ]]; then
  mapfile -t scales < <(ctl metrics quickstart -o jsonl | sed -n 's/.*"loss_scale": *\([0-9.]*\).*/\1/p')
  skips=$(ctl metrics quickstart -o jsonl | grep -c '"skipped"' || true)
  echo "loss scale        ${scales[0]:-} to ${scales[-1]:-}, $skips steps skipped"
fi
echo "checkpoint        $checkpoint"
if [[ -n $checkpoint ]]; then
  prompt='And the LORD said'
  [[ $corpus == linux-doc ]] && prompt='The kernel'
  echo "sample:"
  "$bin/ravelctl" generate --checkpoint "$checkpoint" --prompt "$prompt" | fold -s -w 100 | sed 's/^/  /'
fi

status=0
if [[ $follow != 0 || ${state^^} != SUCCEEDED ]]; then
  echo "quickstart.sh: the job ended as ${state:-unknown} (ravelctl exit $follow); logs are in $run" >&2
  status=1
elif ! awk -v last="$last" -v entropy="$entropy" 'BEGIN { exit !(last != "" && last + 0 < 0.9 * entropy) }'; then
  echo "quickstart.sh: last loss $last is not clearly below the unigram entropy $entropy: the model has not learned" >&2
  status=1
fi

if [[ $keep == yes ]]; then
  say "Still running"
  cat <<TEXT
  export PATH=$bin:\$PATH RAVEL_COORDINATOR=$address
  ravelctl --coordinator $address list
  ravelctl --coordinator $address submit -f $job --follow     # after giving it another name
  kill ${started[*]}     # stops the coordinator and the workers
TEXT
  started=()
fi
exit $status
