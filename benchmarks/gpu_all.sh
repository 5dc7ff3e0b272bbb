#!/usr/bin/env bash
# Everything that is measured on one GPU, in order of worth, in parts of nine minutes each.
#
#   benchmarks/gpu_all.sh --part 1 --out gpu-results     a quick try of each recipe; the tests that need a GPU
#   benchmarks/gpu_all.sh --part 2 --out gpu-results     text, image (with memory predicted and measured)
#   benchmarks/gpu_all.sh --part 3 --out gpu-results     video, questions
#   benchmarks/gpu_all.sh --part 4 --out gpu-results     the meter against a stopwatch; GPT-2; a plain loop
#   benchmarks/gpu_all.sh --part 5 --out gpu-results     text and questions with either kernels, compiled and not
#   benchmarks/gpu_all.sh --part 2 --out gpu-results --scale small      the same code on a CPU
#
# A part that is done early goes on with the next ones, as far as its time allows (--budget-s, 530 s by default). What
# is done stays done: give the same folder to the next call, also on another machine of the same kind. The folder holds
# at most eight files: done, log, and a record and a table of each script. benchmarks/README.md says what to bring to a
# machine without network.
set -euo pipefail

part=1 out="" scale=full budget_s=530
while (($#)); do
  case "$1" in
    --part) part=$2 ;;
    --out) out=$2 ;;
    --scale) scale=$2 ;;
    --budget-s) budget_s=$2 ;;
    *)
      echo "$0: unknown option $1; there are --part 1..5, --out DIR, --scale full|small, --budget-s SECONDS" >&2
      exit 2
      ;;
  esac
  shift 2 || { echo "$0: $1 needs a value" >&2; exit 2; }
done
if [[ ! $part =~ ^[1-5]$ || -z $out || ! $scale =~ ^(full|small)$ || ! $budget_s =~ ^[0-9]+$ ]]; then
  echo "usage: $0 --part 1..5 --out DIR [--scale full|small] [--budget-s SECONDS]" >&2
  exit 2
fi

began_s=$SECONDS
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}src:benchmarks" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export HEADWAY_CACHE=${HEADWAY_CACHE:-$(mktemp -d)}
engine=(benchmarks/engine_gpu.py --scale "$scale" --out "$out")
if [[ $scale == small ]]; then
  engine+=(--steps 2 --warmup 2 --packs 1 --eager)
  truth=(--tiny --steps 4 --rounds 2) loop=(--tiny --rows 2 --tokens 64 --steps 4)
else
  truth=() loop=()
fi

left_s() { echo $((budget_s - (SECONDS - began_s))); }

# item NAME LEAST_S COMMAND...: run once, if at least LEAST_S seconds are left; it is done when it ends with 0
item() {
  local name=$1 least_s=$2 status=0
  shift 2
  if grep -qxF "$name" "$out/done" 2>/dev/null; then
    echo "== $name: done before"
    return
  fi
  if (($(left_s) < least_s)); then
    echo "== $name: $(left_s) s are left, and it needs $least_s s; call again with the same --out"
    return
  fi
  echo "== $name: begins with $(left_s) s left"
  timeout --signal=TERM --kill-after=15 "$(left_s)" "$@" || status=$?
  echo "== $name: ended with status $status, $(left_s) s left"
  if ((status == 0)); then echo "$name" >>"$out/done"; fi
}

# cases NAME LEAST_S SHARE GROUP...: cases of the engine benchmark; those that are done are known from its record
cases() {
  local name=$1 least_s=$2 share=$3
  shift 3
  if (($(left_s) < least_s)); then
    echo "== $name: $(left_s) s are left, and it needs $least_s s; call again with the same --out"
    return
  fi
  echo "== $name: begins with $(left_s) s left"
  timeout --signal=TERM --kill-after=15 "$(left_s)" "$python" "${engine[@]}" --only "$@" \
    --budget-s $(($(left_s) * share / 100)) || echo "== $name: ended with status $?"
}

gpu_tests() {
  local files
  mapfile -t files < <(grep -rlF mark.gpu --include='test_*.py' tests) # others may need packages that are not there
  item "gpu tests" 60 "$python" -m pytest -q -m gpu -p no:cacheprovider --continue-on-collection-errors "${files[@]}"
}

run_part() {
  case "$1" in
    1)
      cases smoke 60 60 smoke
      if [[ $scale == full ]]; then gpu_tests; fi
      ;;
    2) cases "text and image" 150 95 text image ;;
    3) cases "video and questions" 150 95 video vqa ;;
    4)
      item "meter truth" 40 "$python" benchmarks/meter_truth.py ${truth[@]+"${truth[@]}"} --out "$out"
      cases gpt2 60 70 gpt2
      item "plain loop" 90 "$python" benchmarks/plain_loop.py ${loop[@]+"${loop[@]}"} --out "$out"
      ;;
    5) cases "all kernels" 240 95 text vqa --variants ;;
  esac
}

{
  echo "==== part $part, $(date -u +%FT%TZ), $scale sizes, $budget_s s"
  for ((number = part; number <= 5; number++)); do run_part "$number"; done
  echo "==== part $part ended, $(left_s) s left"
} 2>&1 | tee -a "$out/log"
