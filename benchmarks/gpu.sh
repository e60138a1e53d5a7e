#!/bin/sh
# What is to be known first on a machine with a GPU, in three runs of nine minutes each at most. The
# machine needs no network and nothing but torch, triton, transformers, numba, numpy and pytest.
#
#   benchmarks/gpu.sh one results        # is it right, and where does a step's time go?
#   benchmarks/gpu.sh two results        # long contexts, batches, whole calls of a small model
#   benchmarks/gpu.sh three results      # whole calls of a large model, and of MODEL
#   benchmarks/gpu.sh --rehearse results # all of them on a CPU, with small sizes
#
# All files of a run are in results/gpu_one.tar and so on, which is written anew after every part:
# what was measured until a run is stopped stays. MODEL=/models/Qwen2.5-7B-Instruct names a model
# for whole calls, PYTHON the interpreter. With PLAN=1 it only says what it would run.
set -u
cd "$(dirname "$0")/.."
run=${1:-one}
results=$(mkdir -p "${2:-gpu_results}" && cd "${2:-gpu_results}" && pwd)
python=${PYTHON:-python3}
export PYTHONPATH=. PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
files=$(mktemp -d)
trap 'rm -rf "$files" "$files.model"' EXIT
failed=0

keep() { # in a new file first, so that no half of it ever lies there
    tar -C "$files" -cf "$results/.new.tar" . && mv "$results/.new.tar" "$results/gpu_$name_of_run.tar"
}

part() { # name, seconds, command...
    name=$1 seconds=$2
    shift 2
    echo "== $name, at most $seconds s"
    [ -n "${PLAN:-}" ] && return
    timeout --signal INT --kill-after 10 "$seconds" "$@" >"$files/$name.txt" 2>&1
    code=$?
    tail -n 40 "$files/$name.txt"
    if [ $code -ne 0 ]; then
        echo "== $name ended with $code"
        failed=1
    fi
    return $code
}

bench() { # name, seconds, script, options...
    name=$1 seconds=$2 script=$3
    shift 3
    part "$name" "$seconds" "$python" "benchmarks/$script.py" "$@" --json "$files/$name.json"
    keep
}

tests() { # name, what to run...
    name=$1
    shift
    # Other versions than the tests were written for may warn.
    part "$name" 200 "$python" -m pytest -q -W default -m "$mark" --junitxml "$files/$name.xml" "$@"
}

machine() {
    nvidia-smi >"$files/machine.txt" 2>&1 || rocm-smi >"$files/machine.txt" 2>&1
    # Without a C compiler Triton launches nothing.
    cc --version >>"$files/machine.txt" 2>&1 || echo "no C compiler" >>"$files/machine.txt"
    part versions 60 "$python" -c '
import numba, numpy, torch, transformers, triton
print(torch.__version__, triton.__version__, transformers.__version__, numba.__version__, numpy.__version__)
print(numba.njit(lambda x: x + 1)(1), torch.cuda.is_available() and torch.cuda.get_device_name())
from lookahead_hf.ngram_pool.compilation import drafting, wait
import lookahead_hf.drafting.session
wait([drafting])
print(pool.compiled())
from lookahead_hf import kernels
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
one = torch.zeros(1, 1, dtype=torch.int64, device=device)
print(kernels.verify_tree(torch.eye(5, device=device)[None, 2:3], one, one - 1, one[0]).bonus.item())
print(kernels.backend(device))'
    keep
}

one() {
    name_of_run=one
    machine
    bench launches 90 launches --shapes "$large" --nodes 0,15,63 --context "$short" $on
    # Most of their time goes to the compilation of kernels, on one core each.
    tests kernels_tests $kernels_tests &
    kernels=$!
    tests attention_tests tests/kernels/test_attention.py $few &
    attentions=$!
    tests graphs_tests tests/gpu tests/engines/cuda/test_capture.py $few &
    graphs=$!
    for each in $kernels $attentions $graphs; do
        wait "$each" || failed=1
    done
    keep
    bench step 90 step --shapes "$large" --nodes 0,7,15,31,63 --context "$short" --batch 1 \
        --no-compiled $on
    for nodes in $attention; do
        bench "attention_$nodes" 20 kernels --only tree_attention --nodes $nodes \
            --context "$long" $sizes
    done
    bench outside 40 outside --shapes "$small" $on
}

two() {
    name_of_run=two
    machine
    bench products 40 launches --products --shapes "$large" $on
    bench step_long 120 step --shapes "$large" --nodes 0,15,63 --context "$long" --batch 1 \
        --no-compiled $on
    bench step_batches 120 step --shapes "$large" --nodes 0,1,3,7 --context "$short" \
        --batch "$batches" --no-compiled $on
    bench kernels 60 kernels $sizes
    bench calls 120 calls --shapes "$small" --context 256 $on $new
}

three() {
    name_of_run=three
    machine
    bench outside_large 60 outside --shapes "$large" $on
    if [ -n "${MODEL:-}" ]; then
        bench end_to_end 150 end_to_end --prompts-per-family 2 --rounds 2 --no-cache-only \
            --model "$MODEL" $texts
    fi
    # Last, as it compiles for a minute before its second line.
    bench calls_large 240 calls --shapes "$large" $on $new
}

kernels_tests="tests/kernels --ignore tests/kernels/test_attention.py --ignore tests/kernels/test_ahead_of_time.py"
mark=gpu few="" large=8B small=1B short=1024 long=32768 batches=8,32 sizes="" on="" new=""
attention="1 15 63" texts="--dtype bfloat16"
case $run in
one | two | three) $run ;;
--rehearse)
    mark="not slow" few="--collect-only" kernels_tests="tests/kernels/test_compact.py"
    large=tiny small=tiny short=128 long=256 batches=2,3 attention=15
    on="--device cpu --dtype float32 --rounds 1" new="--new-tokens 16"
    MODEL=$files.model texts="--device cpu --families qa $new"
    mkdir "$MODEL"
    "$python" -c "from tests.helpers.tiny_chat import *; save_tiny_chat(Path('$MODEL'))"
    sizes="--device cpu --rounds 1 --vocab 1009 --layers 2 --heads 2 --kv-heads 1 --head-dim 16"
    one
    two
    three
    ;;
*)
    echo "usage: $0 one|two|three|--rehearse [results]" >&2
    exit 2
    ;;
esac
exit $failed
