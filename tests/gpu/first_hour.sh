#!/usr/bin/env bash
# What to run first on a new kind of GPU, from what is cheap to what only makes sense when that has passed.
#   tests/gpu/first_hour.sh BUNDLE [--results FOLDER] [--step N | --next] [--list]
# Each step is a command of at most 10 minutes. Its output is kept under FOLDER (default first-hour here), and it is skipped once
# it has passed; benchmarks go on where they were cut off. Without --step all that have not passed run until one fails; --next is
# the first of them alone. Delete FOLDER/step-N to run a step again.
# Exit code: 0 passed; 1 failed, or its time was up; 2 wrong use; 3 no device; 4 a library is too old (tests/gpu/run.sh).
set -euo pipefail

limit=${RAVEL_STEP_SECONDS:-580}
# Title, then the arguments of run.sh; WORK is a folder that all steps share.
steps=(
  "libraries and device|--suite none"
  "our own kernels: the CPU's bits|--suite gpu_kernels_test --filter *FlatOps*:*MixedOps*:*StepStatistics*"
  "attention through cuDNN and through our own kernel|--suite gpu_kernels_test --filter *GpuAttention*"
  "every op against its formula, in fp32, bf16 and fp16|--suite gpu_kernels_test --filter *GpuOpCase*"
  "training steps in bf16 and fp16, and as graphs|--suite gpu_engine_test --filter *GpuBf16*:*GpuFp16*:GpuSteps*Graph*"
  "speed of our kernels and gemms alone|--suite own_speed"
  "one 8B job: time of a step by instruction, then by graphs|--suite one_job"
  "the rest of the training step|--suite gpu_engine_test"
  "state of the optimizer in the host's memory|--suite gpu_offload_test"
  "the programs as a cluster|--suite services"
  "losses against PyTorch|--suite loss_parity"
  "collectives between processes|--suite gpu_nccl_test"
  "training steps between processes|--suite gpu_engine_nccl_test"
  "8B against PyTorch|--suite none --bench G1 --case 8b-8k --pairs 1 --work WORK"
  "GPT-2 124M against PyTorch|--suite none --bench G4 --pairs 1 --work WORK"
  "kernels against PyTorch|--suite none --bench G5 --pairs 1"
  "gemms against PyTorch|--suite none --bench G6 --pairs 1"
  "steps with that state on the host, against the device|--suite none --bench G7 --pairs 1"
  "a killed trainer of four|--suite lost_trainer"
  "trainers killed within an update on the host|--suite lost_in_offload"
  "layers that trainers share|--suite shared_layers"
)

refuse() {
  echo "first_hour.sh: $1" >&2
  exit 2
}

list() {
  local i
  for i in "${!steps[@]}"; do
    echo "$((i + 1)) ${steps[i]%%|*}: ${steps[i]#*|}"
  done
}

# Runs step $1 in a folder of its own; the file `passed` says that it need not run again.
run_step() {
  local number=$1 title=${steps[$1 - 1]%%|*} folder=$results/step-$1 attempt=1 status=0 words
  if [[ -e $folder/passed ]]; then
    echo "step $number: $title: has passed"
    return
  fi
  while [[ -e $folder/attempt-$attempt ]]; do attempt=$((attempt + 1)); done
  mkdir -p "$folder"
  read -ra words <<<"${steps[$1 - 1]#*|}"
  words=("${words[@]/#WORK/$results/work}")
  echo "step $number: $title"
  timeout --kill-after=10 "$limit" "$bundle/run.sh" "$bundle" --out "$folder/attempt-$attempt" "${words[@]}" 2>&1 |
    tee "$folder/attempt-$attempt.log" || status=${PIPESTATUS[0]}
  [[ $status != 124 && $status != 137 ]] || { echo "step $number: its $limit s are up; run it again to go on"; status=1; }
  if [[ $status == 0 ]]; then touch "$folder/passed"; fi
  echo "step $number: exit $status, output in $folder"
  return "$status"
}

bundle='' results=first-hour only='' next=''
while [[ $# -gt 0 ]]; do
  case $1 in
    --list) list; exit ;;
    --next) next=1; shift ;;
    --results | --step)
      [[ $# -ge 2 ]] || refuse "$1 needs a value"
      if [[ $1 == --step ]]; then only=$2; else results=$2; fi
      shift 2 ;;
    -*) refuse "no option $1; there are --results FOLDER, --step N, --next, --list" ;;
    *) [[ -z $bundle ]] || refuse "one bundle, got $bundle and $1"; bundle=$1; shift ;;
  esac
done
[[ -n $bundle ]] || refuse "which bundle? first_hour.sh BUNDLE [--results FOLDER] [--step N | --next] [--list]"
[[ -z $only || -z $next ]] || refuse "--step or --next, not both"
[[ -z $only || ( $only =~ ^[0-9]+$ && $only -ge 1 && $only -le ${#steps[@]} ) ]] || refuse "--step: expected 1 to ${#steps[@]}, got $only"
[[ -f $bundle/MANIFEST.json && -x $bundle/run.sh ]] || refuse "$bundle is no bundle: no MANIFEST.json and run.sh in it"
bundle=$(readlink -f "$bundle")
mkdir -p "$results"
results=$(readlink -f "$results")
[[ -e $results/MANIFEST.json ]] || cp "$bundle/MANIFEST.json" "$results/MANIFEST.json"
cmp -s "$bundle/MANIFEST.json" "$results/MANIFEST.json" || refuse "$results has results of another bundle: name another folder"

for number in $(seq "${#steps[@]}"); do
  [[ -z $only || $only == "$number" ]] || continue
  if [[ -n $next && -e $results/step-$number/passed ]]; then continue; fi
  run_step "$number"
  [[ -z $next ]] || exit 0
done
