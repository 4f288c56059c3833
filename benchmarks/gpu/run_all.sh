#!/usr/bin/env bash
# All that is to be known of a GPU, in less than 8 minutes: tests, step times, a training comparison, offload.
# Results go to $OUT, or to benchmarks/results/gpu. `--tiny` rehearses it on CPU, with Triton's interpreter.
set -uo pipefail
cd "$(dirname "$0")/../.."
export OUT="${OUT:-benchmarks/results/gpu}"
export PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}"
PYTHON="${PYTHON:-python3}"
mkdir -p "$OUT"
failed=0

# The second at which a part is stopped, its name, and its command. What a part leaves of its time goes to the next ones;
# one that fails does not keep the others from running.
part() {
    local stop="$1" name="$2" began="$SECONDS"
    shift 2
    echo "== $name"
    timeout --kill-after=5 "$((stop - began))" "$@" 2>&1 | tee "$OUT/$name.log"
    local status="${PIPESTATUS[0]}"
    [ "$status" -eq 0 ] || failed=1
    echo "$name,$status,$((SECONDS - began))" >> "$OUT/parts.csv"
}

echo "part,status,seconds" > "$OUT/parts.csv"
if [ "${1:-}" = "--tiny" ]; then
    export TRITON_INTERPRET=1
    part 120 step_time "$PYTHON" -m benchmarks.gpu.step_time --tiny --device cpu --backend triton
    part 200 train "$PYTHON" -m benchmarks.gpu.train --tiny --device cpu --backend triton
    part 270 offload "$PYTHON" -m benchmarks.gpu.offload --tiny --device cpu --backend triton
else
    # Caches of their own: a first step is to be measured where nothing has been compiled before.
    caches="$(mktemp -d)"
    trap 'rm -rf "$caches"' EXIT
    export TRITON_CACHE_DIR="$caches/triton" TORCHINDUCTOR_CACHE_DIR="$caches/inductor"
    part 175 step_time "$PYTHON" -m benchmarks.gpu.step_time
    # The repository's options want plug-ins that a GPU machine need not have.
    workers=()
    "$PYTHON" -c "import xdist" 2> /dev/null && workers=(-n 8)
    part 295 tests "$PYTHON" -m pytest tests/test_triton_gpu.py tests/test_offload.py -q -c /dev/null --rootdir . \
        --import-mode=importlib "${workers[@]}" -p no:cacheprovider -m "gpu and not slow"
    part 385 train "$PYTHON" -m benchmarks.gpu.train
    part 470 offload "$PYTHON" -m benchmarks.gpu.offload
fi
cat "$OUT/parts.csv"
exit "$failed"
