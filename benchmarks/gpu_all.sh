#!/bin/sh
# Everything that wants a GPU, in one call: the kernel tests without the interpreter, then both benchmarks.
#
#     sh benchmarks/gpu_all.sh [seconds, 540]
#
# Needs torch, triton, numpy, einops, and pytest for the tests; matplotlib for the pictures.  TRL, Liger and
# cut-cross-entropy are compared with where they can be imported (PYTHONPATH may name a folder of their wheels,
# unpacked).  Reports go to $OUT, or here: gpu.json, gpu_logprob.json, gpu_tests.log, pictures.
# The exit code is 1 if any of the three found something wrong; the others have run all the same.
cd "$(dirname "$0")/.." || exit 1
seconds=${1:-540}
export OUT="${OUT:-.}" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export CUBLAS_WORKSPACE_CONFIG=:4096:8 # deterministic matrix products, which the tests ask for
unset TRITON_INTERPRET
wrong=0

# A quarter of the time.  Compiling is what takes it, so several processes share the one GPU.
if python3 -c 'import pytest, xdist' 2>/dev/null; then
    timeout $((seconds / 4)) python3 -m pytest -q -p no:cacheprovider -n 8 -m "not slow" tests/kernels \
        --ignore=tests/kernels/test_benchmarks.py >"$OUT/gpu_tests.log" 2>&1 || wrong=1
    tail -n 25 "$OUT/gpu_tests.log"
else
    echo "no pytest or no pytest-xdist: tests/kernels was not run"
fi
python3 benchmarks/gpu.py --budget $((seconds * 7 / 20)) || wrong=1
python3 benchmarks/gpu_logprob.py --budget $((seconds * 2 / 5)) || wrong=1
exit $wrong
