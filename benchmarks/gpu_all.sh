#!/usr/bin/env bash
# Everything that is measured on one GPU, in order of worth, in parts of at most nine minutes.
#
#   benchmarks/gpu_all.sh --part 1 --out gpu-results     a quick try of each recipe, beside the tests that need a GPU;
#                                                        attention's kernels; text in one pack and in four, the
#                                                        update in one pass and in several
#   benchmarks/gpu_all.sh --part 2 --out gpu-results     images and video as their recipes say and in shorter packs;
#                                                        questions in one pack and in four
#   benchmarks/gpu_all.sh --part 3 --out gpu-results     the meter against a stopwatch; `headway train` with its feed;
#                                                        text in float8 beside bfloat16; GPT-2; a plain loop; text and
#                                                        questions with either kernels, compiled and not
#   benchmarks/gpu_all.sh --part 4 --out gpu-results     Trainer, TRL, torchtitan and Headway on one model
#   benchmarks/gpu_all.sh --part 1 --out gpu-results --scale small      the same code on a CPU
#
# A part that is done early goes on with the next ones, as far as its time allows (--budget-s, 530 s by default). What
# is done stays done: give the same folder to the next call, also on another machine of the same kind. No case may take
# more than its own time. --pieces DIR keeps a tar of the folder in DIR, in files of at most 15 MB, written anew after
# every case: for machines that give back few files. benchmarks/README.md says what to bring to one without network.
set -euo pipefail

part=1 out="" scale=full budget_s=530 pieces=""
while (($#)); do
  case "$1" in
    --part) part=$2 ;;
    --out) out=$2 ;;
    --scale) scale=$2 ;;
    --budget-s) budget_s=$2 ;;
    --pieces) pieces=$2 ;;
    *)
      echo "$0: unknown option $1; there are --part 1..4, --out DIR, --scale full|small, --budget-s SECONDS, --pieces DIR" >&2
      exit 2
      ;;
  esac
  shift 2 || { echo "$0: $1 needs a value" >&2; exit 2; }
done
if [[ ! $part =~ ^[1-4]$ || -z $out || ! $scale =~ ^(full|small)$ || ! $budget_s =~ ^[0-9]+$ ]]; then
  echo "usage: $0 --part 1..4 --out DIR [--scale full|small] [--budget-s SECONDS] [--pieces DIR]" >&2
  exit 2
fi

began_s=$SECONDS
mkdir -p "$out" ${pieces:+"$pieces"}
touch "$out/done"
out=$(cd "$out" && pwd)
pieces=${pieces:+$(cd "$pieces" && pwd)}
cd "$(dirname "$0")/.."
exec > >(tee -a "$out/log") 2>&1
python=${PYTHON:-python3}
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}src:benchmarks" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export HEADWAY_CACHE=${HEADWAY_CACHE:-$(mktemp -d)}
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$HEADWAY_CACHE/inductor} # what a quick try compiled is there
recipes=(text image video vqa)
in_4_packs=(--tokens-per-pack 20480 --accumulation 4 --recompute full,-attention,-projections,-mlp)
engine=(benchmarks/engine_gpu.py --scale "$scale" --warmup 2)
if [[ $scale == small ]]; then
  engine+=(--steps 2 --packs 1 --eager)
  truth=(--tiny --steps 4 --rounds 2) loop=(--tiny --rows 2 --tokens 64 --steps 4)
  peers=(--scale small --steps 1 --rounds 1 --defaults) flash=benchmarks/flash_attn_wheel # on a CPU nothing asks for it
  at_once=1
else
  engine+=(--steps 4 --packs 2)
  truth=() loop=() peers=() flash=""
  # four tries of two layers fit 120 GiB side by side, two fit 80
  memory_mib=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | head -1 || true)
  at_once=$((${memory_mib:-0} > 120000 ? 4 : 2))
fi

left_s() { echo $((budget_s - (SECONDS - began_s))); }
say() { echo "== $*"; }

# keep the results in pieces; a machine that is taken back in the middle of it leaves the ones before
bundle() {
  [[ -n $pieces ]] || return 0
  local folder piece
  folder=$(mktemp -d)
  tar czf - -C "$out" . | split -b 15000000 -d - "$folder/gpu.tar.gz."
  for piece in "$pieces"/gpu.tar.gz.*; do
    if [[ ! -e $folder/${piece##*/} ]]; then rm -f "$piece"; fi
  done
  mv -f "$folder"/gpu.tar.gz.* "$pieces"
  rmdir "$folder"
}

ended() {
  local jobs
  jobs=$(jobs -p)
  if [[ -n $jobs ]]; then kill $jobs 2>/dev/null || true; fi
  bundle
}
trap ended EXIT
trap 'exit 143' TERM
trap 'exit 130' INT

# within SECONDS COMMAND...: what it overruns is taken from nobody; waited for so that a signal is heard at once
within() {
  local most_s=$1
  shift
  timeout --signal=TERM --kill-after=15 "$most_s" "$@" &
  wait $!
}

# item NAME LEAST_S MOST_S COMMAND...: run once, if at least LEAST_S seconds are left; it is done when it ends with 0
item() {
  local name=$1 least_s=$2 most_s=$3 status=0
  shift 3
  if grep -qxF "$name" "$out/done"; then
    say "$name: done before"
    return
  fi
  if (($(left_s) < least_s)); then
    say "$name: $(left_s) s are left, and it needs $least_s s; call again with the same --out"
    return
  fi
  if (($(left_s) < most_s)); then most_s=$(left_s); fi
  say "$name: begins with $(left_s) s left, of which it may take $most_s s"
  within "$most_s" "$@" || status=$?
  say "$name: ended with status $status, $(left_s) s left"
  if ((status == 0)); then echo "$name" >>"$out/done"; fi
  bundle
}

# recipe NAME ITEM LEAST_S MOST_S OPTIONS...: a recipe at its width, in the way in which its quick try ran, with a profile
recipe() {
  local name=$1 item=$2 least_s=$3 most_s=$4 case_s
  shift 4
  if [[ ! -e $out/smoke_$name/way ]]; then
    say "$item: its quick try has not run to the end, so it is left out; see smoke_$name.log"
    return
  fi
  case_s=$(($(left_s) < most_s ? $(left_s) : most_s))
  item "$item" "$least_s" "$most_s" "$python" "${engine[@]}" --out "$out" --only "$name" $(<"$out/smoke_$name/way") \
    --profiles "$out/profiles" --budget-s $((case_s - 15)) "$@"
}

# smoke NAME: a quick try of a recipe; where it fails, with PyTorch's kernels, then without compilation
smoke() {
  local name=$1 way most_s
  for way in "" "--kernels torch" "--eager"; do
    most_s=$(($(left_s) < 100 ? $(left_s) : 100))
    if ((most_s < 20)); then return; fi
    if within $((most_s + 20)) "$python" "${engine[@]}" --packs 1 --only smoke --recipes "$name" $way \
      --out "$out/smoke_$name" --budget-s "$most_s"; then
      echo "$way" >"$out/smoke_$name/way"
      return
    fi
  done
}

# smokes AT_ONCE [WORDS]: of the recipes that have not run yet, so many side by side; those whose record has the words
smokes() {
  local name running=()
  for name in "${recipes[@]}"; do
    if [[ -e $out/smoke_$name/way ]]; then continue; fi
    if (($# > 1)) && ! grep -qs "$2" "$out/smoke_$name"/*.json; then continue; fi
    aside smoke "$name" >>"$out/smoke_$name.log" 2>&1 &
    running+=($!)
    if ((${#running[@]} == $1)); then
      wait "${running[@]}" || true
      running=()
    fi
  done
  if ((${#running[@]})); then wait "${running[@]}" || true; fi
}

# aside FUNCTION...: in a process of its own, which ends what it started when it is ended
aside() {
  trap 'kill $(jobs -p) 2>/dev/null; exit 143' TERM
  trap - EXIT
  "$@"
}

try_recipes() {
  local name error missing=() tests=""
  for name in "${recipes[@]}"; do
    if [[ ! -e $out/smoke_$name/way ]]; then missing+=("$name"); fi
  done
  if ((${#missing[@]} == 0 || $(left_s) < 40)); then return 0; fi
  # alone, so that nothing disturbs it: its rates are those of all cases
  within 60 "$python" -c "import engine_case as e; e.describe_machine(print)" || true
  if [[ $scale == full ]] && ! grep -qxF "gpu tests" "$out/done"; then
    aside gpu_tests >"$out/tests.log" 2>&1 &
    tests=$!
  fi
  say "quick tries of ${recipes[*]}, $at_once side by side: begin with $(left_s) s left"
  smokes "$at_once"
  smokes 1 "out of memory" # alone there may be room
  if [[ -n $tests ]]; then wait "$tests" || true; fi
  for name in "${missing[@]}"; do
    if [[ -e $out/smoke_$name/way ]]; then
      say "quick try of $name: $(sed 's/^$/as its recipe says/' "$out/smoke_$name/way")"
    else
      error=$(grep -as Error "$out/smoke_$name.log" | tail -1 | cut -c1-300) || true
      say "quick try of $name: ${error:-there was no time for it}"
    fi
  done
  if [[ -e $out/tests.log ]]; then say "gpu tests: $(tail -1 "$out/tests.log")"; fi
  say "quick tries: ended, $(left_s) s left"
  bundle
}

# the tests that need a GPU; others may need packages that are not there. Those that fail are in tests.log
gpu_tests() {
  local files status=0
  mapfile -t files < <(grep -rlF mark.gpu --include='test_*.py' tests)
  within 150 "$python" -m pytest -q -m gpu -p no:cacheprovider --continue-on-collection-errors "${files[@]}" || status=$?
  if ((status <= 1)); then echo "gpu tests" >>"$out/done"; fi
}

# fastest NAME: the options that choose the kernel whose attention takes a recipe's layers the least time
fastest() {
  local kernel
  kernel=$(sed -n "s/^\* fastest for $1: //p" "$out"/attention_gpu_*.md 2>/dev/null | head -1) || true
  if [[ -n $kernel ]]; then echo "--attention $kernel"; fi
}

run_part() {
  case "$1" in
    1)
      try_recipes
      if [[ $scale == full ]]; then
        item attention 30 90 "$python" benchmarks/attention_gpu.py --repeats 5 --out "$out"
      fi
      recipe text text 55 120 --packs 1 --steps 3
      recipe text "text in 4 packs" 60 120 "${in_4_packs[@]}"
      recipe text "text in 4 packs, memory full" 60 120 --tokens-per-pack 20480 --accumulation 4 --recompute fullest
      recipe text "text in 4 packs, separate updates" 60 100 "${in_4_packs[@]}" --separate-updates
      ;;
    2)
      recipe image image 80 150
      recipe image "image in 3 packs" 80 150 --tokens-per-pack 20480 --accumulation 3 --recompute fullest
      recipe video video 75 150 $(fastest video)
      recipe video "video in 2 packs" 75 150 $(fastest video) --tokens-per-pack 25600 --accumulation 2 \
        --recompute fullest
      recipe vqa vqa 50 120 $(fastest vqa)
      recipe vqa "vqa, 4 packs" 50 120 $(fastest vqa) --accumulation 4
      ;;
    3)
      item "meter truth" 20 120 "$python" benchmarks/meter_truth.py ${truth[@]+"${truth[@]}"} --out "$out"
      recipe text "text, headway train" 60 150 --only train "${in_4_packs[@]}"
      if [[ $scale == full ]]; then
        for dtype in bfloat16-autocast float8; do # with moments of 8 bits, float32 weights leave room
          recipe text "text, $dtype" 60 120 --tokens-per-pack 20480 --accumulation 4 --set "run.dtype=$dtype" \
            --set optim.state=8bit
        done
      fi
      item gpt2 30 120 "$python" "${engine[@]}" --out "$out" --only gpt2 --budget-s 100
      item "plain loop" 30 150 "$python" benchmarks/plain_loop.py ${loop[@]+"${loop[@]}"} --out "$out"
      item "text, all kernels" 60 330 "$python" "${engine[@]}" --out "$out" --only text --variants --budget-s 310
      item "vqa, all kernels" 60 240 "$python" "${engine[@]}" --out "$out" --only vqa --variants --budget-s 220
      ;;
    4)
      PYTHONPATH="$PYTHONPATH:$flash" item peers 60 530 "$python" benchmarks/peers.py "${peers[@]}" --out "$out" \
        --budget-s $(($(left_s) - 15))
      ;;
  esac
}

done_before=$(wc -l <"$out/done")
echo "==== part $part, $(date -u +%FT%TZ), $scale sizes, $budget_s s"
for ((number = part; number <= 4; number++)); do run_part "$number"; done
echo "==== part $part ended, $(left_s) s left"
if [[ $(wc -l <"$out/done") == "$done_before" && $(tail -1 "$out/done") != peers ]]; then
  say "nothing was measured to its end; call again with the same --out, or with a larger --budget-s"
  exit 1
fi
