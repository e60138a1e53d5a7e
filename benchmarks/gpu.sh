#!/bin/sh
# Everything that needs a GPU, within ten minutes: the tests marked gpu, the kernels, the steps, and
# `generate` from end to end. What was measured until a part's time is over stays.
#
#   PYTHON=python3 benchmarks/gpu.sh results
#   MODEL=/models/Qwen2.5-7B-Instruct benchmarks/gpu.sh results
set -u
cd "$(dirname "$0")/.."
out=${1:-gpu_results}
python=${PYTHON:-python3}
model=${MODEL:+--model $MODEL}
mkdir -p "$out"
failed=0

part() { # name, seconds, command...
    name=$1 seconds=$2
    shift 2
    echo "== $name, at most $seconds s"
    PYTHONPATH=. timeout --signal INT --kill-after 10 "$seconds" "$@" >"$out/$name.txt" 2>&1
    code=$?
    tail -n 60 "$out/$name.txt"
    if [ $code -ne 0 ]; then
        echo "== $name ended with $code"
        failed=1
    fi
}

nvidia-smi >"$out/machine.txt" 2>&1 || rocm-smi >"$out/machine.txt" 2>&1
part tests 160 "$python" -m pytest -q -m gpu --junitxml "$out/tests.xml" tests/gpu tests/kernels
part kernels 50 "$python" benchmarks/kernels.py --json "$out/kernels.json" --plot "$out/kernels.svg"
part step 200 "$python" benchmarks/step.py --json "$out/step.json" --plot "$out/step.svg"
# shellcheck disable=SC2086  # no model is no argument
part end_to_end 150 "$python" benchmarks/end_to_end.py --dtype bfloat16 --prompts-per-family 2 \
    --rounds 2 --no-cache-only --json "$out/end_to_end.json" --plot "$out/end_to_end.svg" $model
exit $failed
