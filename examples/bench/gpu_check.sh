#!/bin/sh
# Everything that needs a GPU, in under six minutes: the GPU tests, then the kernel benchmark.
#   examples/bench/gpu_check.sh [PYTHON]
# PYTHON (default: .venv/bin/python, else python3) needs torch with CUDA, triton, numpy, pytest,
# pytest-asyncio and hypothesis. Run from anywhere.
set -eu
cd "$(dirname "$0")/../.."
python=${1:-}
if [ -z "$python" ]; then
    if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python=python3; fi
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
"$python" -c 'import torch; assert torch.cuda.is_available(), "no CUDA device"; print(torch.cuda.get_device_name())'
status=0
timeout 200 "$python" -m pytest -q -m gpu tests/test_kernels_*.py || status=$?
timeout 140 "$python" examples/bench/bench_kernels.py --device cuda || status=$?
exit $status
