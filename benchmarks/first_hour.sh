#!/usr/bin/env bash
# The first hour on a machine with a GPU: install, test, measure, and pack what came of it.
set -euo pipefail

usage() {
  cat <<'END'
usage: benchmarks/first_hour.sh [options]

Installs fasttrain into an environment of its own, runs the tests that need a GPU and the benchmarks,
and packs logs, receipts, results and versions into one file. A part that fails or takes too long
doesn't end the others; a table at the end says what became of each.

  --minutes N      time for all of it, shared out among the parts (default: 30)
  --out DIR        folder to make for all of it (default: ./first-hour-DATE)
  --torch SPEC     requirement for pip (default: the version in constraints.txt, such as torch==2.13.0).
                   PyPI's builds for Linux are built for a recent CUDA
  --torch-index URL  index to take torch from, where the driver is too old for PyPI's build, such as
                   https://download.pytorch.org/whl/cu126
  --python PATH    install nothing, use the environment of this Python; it needs what
                   pip install '.[test]' brings
  --rehearse       run all parts on the CPU with tiny sizes: a test of the script, no measurement
  -h, --help       show this

Exit code: 0 if all parts succeeded, 1 if one failed, 2 for a usage error, 130 if interrupted.
END
}

usage_error() {
  echo "error: $1; --help shows the options" >&2
  exit 2
}

minutes=30 out="" torch="" torch_index="" python="" rehearse=""
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage && exit 0 ;;
    --rehearse) rehearse=yes && shift && continue ;;
    --minutes | --out | --torch | --torch-index | --python) ;;
    *) usage_error "unknown option $1" ;;
  esac
  [ $# -ge 2 ] || usage_error "$1 needs a value"
  case $1 in
    --minutes) minutes=$2 ;;
    --out) out=$2 ;;
    --torch) torch=$2 ;;
    --torch-index) torch_index=$2 ;;
    --python) python=$2 ;;
  esac
  shift 2
done
[[ $minutes =~ ^[1-9][0-9]{0,3}$ ]] || usage_error "--minutes takes a number of minutes, not $minutes"
if [ -n "$python" ]; then
  [ -z "$torch$torch_index" ] || usage_error "--python installs nothing, so --torch means nothing"
  # As named, and not where a link leads: that is how Python finds its environment.
  python=$(command -v "$python") || usage_error "--python names no program"
  [[ $python = /* ]] || python=$PWD/$python
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
name=first-hour-$(date +%Y%m%d-%H%M%S)
out=${out:-$PWD/$name}
# Beside each other: what is packed, and what is not.
mkdir -p "$(dirname "$out")"
mkdir "$out" 2>/dev/null || usage_error "--out names a folder that is there already, or can't be made"
out=$(cd "$out" && pwd)
results=$out/results
mkdir "$results"
export PYTHONPATH=$root/src
# A shell that was set up for other work must not steer what runs here.
unset "${!FASTTRAIN_@}" "${!SLURM_@}"

# Parts: each gets its weight's share of the time that is left, so that what one leaves goes to those
# after it.
parts=(install nvidia-smi torch doctor tests small gpt resnet50 unet gpt-graphs tests-compile)
declare -A weights=(
  [install]=80 [nvidia-smi]=1 [torch]=6 [doctor]=3 [tests]=35 [small]=4
  [gpt]=20 [resnet50]=15 [unet]=15 [gpt-graphs]=12 [tests-compile]=30
)
declare -A exit_codes=() times=() stopped=()
ends_at=$((SECONDS + 60 * minutes))
interrupted="" running=""
# Each part is a job with a process group of its own, which has SIGINT's usual meaning then.
set -m
trap 'interrupted=yes; [ -z "$running" ] || kill -INT -- "-$running"' INT TERM

limit_of() { # PART: seconds, of those that are left
  local weight=0 part from=""
  for part in "${parts[@]}"; do
    [ "$part" != "$1" ] || from=yes
    [ -z "$from" ] || weight=$((weight + ${weights[$part]}))
  done
  local limit=$(((ends_at - SECONDS) * ${weights[$1]} / weight))
  echo $((limit > 1 ? limit : 1))
}

run_part() { # PART COMMAND...: never fails; the exit code goes into the table
  local part=$1 began=$SECONDS limit code=0
  shift
  [ -z "$interrupted" ] || return 0
  limit=$(limit_of "$part")
  echo "== $part: at most $limit s; tail -f $results/$part.log"
  # SIGINT to its whole process group, after which pytest still reports; SIGKILL if that doesn't do.
  timeout --signal=INT --kill-after=30 "$limit" "$@" >"$results/$part.log" 2>&1 </dev/null &
  running=$!
  wait "$running" || code=$?
  while kill -0 "$running" 2>/dev/null; do # a signal to this script ended the wait alone
    wait "$running" || code=$?
  done
  running=""
  exit_codes[$part]=$code
  times[$part]=$((SECONDS - began))
  # 137: after SIGKILL, which timeout sends when SIGINT didn't do
  if [ "$code" = 124 ] || { [ "$code" = 137 ] && [ $((SECONDS - began)) -ge "$limit" ]; }; then
    stopped[$part]=yes
  fi
  echo "   $part: $(word_of "$part"), exit code $code, after ${times[$part]} s"
}

install_all() { # the environment, torch first: the index of torch has nothing else
  local constraints=$out/constraints.txt wanted version
  wanted=${torch:-$(grep '^torch==' "$root/constraints.txt")}
  "${PYTHON3:-python3}" -m venv "$out/venv"
  "$python" -m pip install --quiet --upgrade pip
  "$python" -m pip install ${torch_index:+--index-url "$torch_index"} "$wanted"
  # What comes after it must not replace it by another build.
  version=$("$python" -c 'from importlib.metadata import version; print(version("torch"))')
  { grep -v '^torch==' "$root/constraints.txt" && echo "torch==$version"; } >"$constraints"
  "$python" -m pip install -c "$constraints" -e "$root[test]"
}

versions() { # names and versions only: a URL of a package may hold a password
  "$python" -m pip list --format=freeze --disable-pip-version-check --no-input >"$results/versions.txt"
  "$python" - "$device" "$out/divisor" <<'END'
import platform
import sys

import torch

def divisor(gib):
    """Return by how much batches are divided: four loops keep their memory on one GPU."""
    return 1 if gib >= 44 else 4 if gib >= 20 else 8


print(f"{platform.platform()}, Python {platform.python_version()}")
print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
for number in range(torch.cuda.device_count()):
    print(f"GPU {number}: {torch.cuda.get_device_properties(number)}")
if sys.argv[1] == "cuda":
    # One kernel: a build of torch without kernels for this GPU fails here, and not in all parts.
    with open(sys.argv[2], "w") as file:
        print(divisor(torch.cuda.get_device_properties(0).total_memory / 2**30), file=file)
    print("a sum on the GPU:", torch.ones(1000, device="cuda").sum().item())
END
}

ask_nvidia_smi() { # no lists of processes, which name what other users run
  if ! command -v nvidia-smi; then
    echo "there is no nvidia-smi here"
    [ "$device" = cpu ]
    return
  fi
  nvidia-smi --query-gpu=index,name,driver_version,memory.total,memory.used,compute_cap,pstate,power.limit --format=csv
  nvidia-smi topo -m || true
}

# Short tracebacks: long ones show arguments, and an environment is one.
run_tests() { # PART PYTEST-ARGUMENT...
  local part=$1
  shift
  # --continue-...: one framework that can't be imported must not end all tests
  run_part "$part" env GPU_TESTS_DEVICE="$device" "$python" -m pytest -m gpu -n0 -v --tb=short \
    --durations=10 --continue-on-collection-errors -p no:cacheprovider \
    --rootdir="$root" -c "$root/pyproject.toml" --junitxml="$results/$part.xml" \
    --basetemp="$out/$part" -o tmp_path_retention_policy=failed "$@"
  keep_runs "$part"
}

keep_runs() { # PART: what the failed tests' runs left; plans, which name variables, stay behind
  local files=(-name receipt.json -o -name crash.json -o -name hang.json -o -name 'rank-*' -o -name agent.log)
  [ -d "$out/$1" ] || return 0
  mkdir -p "$results/runs/$1"
  (cd "$out/$1" && find . -type f \( "${files[@]}" \) -exec cp --parents -t "$results/runs/$1" {} +) || true
}

run_speed() { # PART GPU_SPEED-ARGUMENT...
  local part=$1
  shift
  run_part "$part" "$python" "$root/benchmarks/gpu_speed.py" --device "$device" \
    --json "$results/$part.json" --keep "$results/$part" "$@" ${sizes[@]+"${sizes[@]}"}
}

word_of() { # PART
  local code=${exit_codes[$1]-}
  if [ -z "$code" ]; then
    echo "not run"
  elif [ -n "${stopped[$1]-}" ]; then
    echo "stopped at its time limit"
  elif [ "$code" = 0 ]; then
    echo ok
  else
    echo failed
  fi
}

print_summary() {
  local part
  printf '%-14s %-26s %9s %8s\n' part outcome "exit code" seconds
  for part in "${parts[@]}"; do
    printf '%-14s %-26s %9s %8s\n' \
      "$part" "$(word_of "$part")" "${exit_codes[$part]--}" "${times[$part]--}"
  done
}

# Functions that timeout has to be able to run are run by a shell of their own.
in_shell() { # FUNCTION
  local shared
  shared=$(declare -p root out results python device torch torch_index)
  echo "set -euo pipefail; $shared; $(declare -f "$1"); $1"
}

run_all() {
  if [ -n "$python" ]; then
    parts=("${parts[@]:1}")
  else
    python=$out/venv/bin/python
    run_part install bash -c "$(in_shell install_all)"
    [ "${exit_codes[install]-1}" = 0 ] || return 0
  fi
  run_part nvidia-smi bash -c "$(in_shell ask_nvidia_smi)"
  run_part torch bash -c "$(in_shell versions)"
  [ "${exit_codes[torch]-1}" = 0 ] || return 0
  run_part doctor "$python" -m fasttrain doctor
  run_tests tests "$root/tests/gpu" "$root/tests/contract/test_frameworks.py" \
    --ignore="$root/tests/gpu/test_gpu_compile.py" ${chosen[@]+"${chosen[@]}"}
  run_part small "$python" "$root/benchmarks/small_products.py" --device "$device" ${tiny[@]+"${tiny[@]}"}
  local divisor=1
  [ ! -s "$out/divisor" ] || divisor=$(<"$out/divisor")
  run_speed gpt --models gpt --batch $((8 / divisor))
  run_speed resnet50 --models resnet50 --batch $((64 / divisor))
  run_speed unet --models unet --batch $((8 / divisor))
  # CUDA graphs under fasttrain, too
  run_speed gpt-graphs --models gpt --batch $((8 / divisor)) --sides same expert fasttrain --compile "$graphs"
  # Last, because it is long: a limit of time costs nothing else.
  run_tests tests-compile "$root/tests/gpu/test_gpu_compile.py" \
    ${chosen_compile[@]+"${chosen_compile[@]}"}
}

device=cuda graphs=reduce-overhead tiny=() sizes=() chosen=() chosen_compile=()
if [ -n "$rehearse" ]; then
  device=cpu graphs=off
  tiny=(--tiny)
  sizes=(--tiny --batch 2 --blocks 3 --steps 2 --warmup 1 --compile off --expert-compile off)
  chosen=(-k "not percent or off")
  chosen_compile=(-k "the_plan_says or on_its_module and overhead and state")
  # Torch sees no GPU then, so that a rehearsal is one on a machine that has some, too.
  export CUDA_VISIBLE_DEVICES=
fi

run_all
print_summary | tee "$results/summary.txt"
tar -czf "$out/$name.tar.gz" -C "$out" --transform "s,^results,$name," results
echo "packed into $out/$name.tar.gz"
[ -z "$interrupted" ] || exit 130
for part in "${parts[@]}"; do
  [ "${exit_codes[$part]-1}" = 0 ] || exit 1
done
