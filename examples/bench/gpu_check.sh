#!/bin/sh
# Everything that needs a GPU, in under six minutes: the GPU tests, a whole engine with and without
# CUDA graphs, then the kernel benchmark.
#   examples/bench/gpu_check.sh [PYTHON]
# PYTHON (default: .venv/bin/python, else python3) needs torch with CUDA, triton, numpy, pytest,
# pytest-asyncio and hypothesis, and for the engine transformers, xxhash and msgpack; with
# pytest-xdist the tests' kernels compile side by side, without it some may not get their turn. Run
# from anywhere.
set -eu
cd "$(dirname "$0")/../.."
python=${1:-}
if [ -z "$python" ]; then
    if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python=python3; fi
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
"$python" -c 'import torch; assert torch.cuda.is_available(), "no CUDA device"; print(torch.cuda.get_device_name())'
workers=
if "$python" -c 'import xdist' 2>/dev/null; then workers="-n 8"; fi
status=0
# shellcheck disable=SC2086  # no workers are no argument
timeout 120 "$python" -m pytest -q -m gpu $workers tests/test_kernels_*.py tests/test_graphs.py || status=$?
timeout 100 "$python" examples/bench/bench_steps.py --budget 70 || status=$?
timeout 130 "$python" examples/bench/bench_kernels.py --device cuda --budget 85 || status=$?
exit $status
