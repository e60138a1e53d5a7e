#!/bin/sh
# Everything that needs a GPU, within ten minutes: the tests marked gpu, the kernels, the steps, what
# lies outside the forward, and `generate` from end to end. What was measured until a part's time is
# over stays.
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
    fi
    return $code
}

tests() { # name, what to run and to leave out...
    name=$1
    shift
    part "$name" 150 "$python" -m pytest -q -m gpu --junitxml "$out/$name.xml" "$@"
}

bench() { # name, seconds, script and options...
    name=$1 seconds=$2
    shift 2
    part "$name" "$seconds" "$python" "$@" --json "$out/$name.json" --plot "$out/$name.svg" ||
        failed=1
}

nvidia-smi >"$out/machine.txt" 2>&1 || rocm-smi >"$out/machine.txt" 2>&1
# Most of their time goes to the compilation of kernels, on one core each.
tests kernels_tests tests/kernels --ignore tests/kernels/test_attention.py &
kernels=$!
tests attention_tests tests/kernels/test_attention.py &
attention=$!
tests other_tests tests --ignore tests/kernels &
other=$!
for each in $kernels $attention $other; do
    wait "$each" || failed=1
done
bench kernels 60 benchmarks/kernels.py
bench outside 40 benchmarks/outside.py
bench step_8B 130 benchmarks/step.py --shapes 8B --nodes 0,15,63 --context 4096
bench step 70 benchmarks/step.py --shapes 1B,0.1B --no-compiled
# shellcheck disable=SC2086  # no model is no argument
bench end_to_end 120 benchmarks/end_to_end.py --dtype bfloat16 --prompts-per-family 2 \
    --rounds 2 --no-cache-only $model
exit $failed
