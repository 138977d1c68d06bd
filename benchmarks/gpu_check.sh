#!/usr/bin/env bash
# Are the Triton kernels right and fast on this GPU? Needs Python with torch (CUDA) and Triton, and nothing else.
# Prints one table; ends with 1 where a kernel is wrong. With pytest installed, the kernels' tests run first.
#   bash benchmarks/gpu_check.sh [--tokens 1100] [--layers 32] ...        PYTHON=/path/to/python names another Python
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
failed=0
if "$python" -c "import pytest, torch; assert torch.cuda.is_available()" 2>/dev/null; then
  "$python" -m pytest -q -o addopts=--import-mode=importlib tests/kernels/fused || failed=1
fi
"$python" benchmarks/gpu_check.py "$@" || failed=1
exit "$failed"
