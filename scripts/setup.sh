#!/bin/sh
# Find a Python that will do, and let it set up .venv (scripts/set_up.py). PYTHON=... names one.
set -u
cd "$(dirname "$0")/.." || exit 1

fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' >/dev/null 2>&1; }

if [ -n "${PYTHON:-}" ]; then
    if ! fits "$PYTHON"; then
        echo "PYTHON=$PYTHON is not a Python 3.11 or newer: $("$PYTHON" --version 2>&1 | head -n 1)" >&2
        exit 1
    fi
    found=$PYTHON
else
    found=
    # 3.11 first: the lock is made and tested with it.
    for candidate in python3.11 python3 python3.12 python3.13 python3.14 python; do
        if fits "$candidate"; then
            found=$candidate
            break
        fi
    done
fi
if [ -z "$found" ]; then
    echo "No Python 3.11 or newer found (python3 is: $(python3 --version 2>&1 | head -n 1))." >&2
    echo "Install Python 3.11, or name one: make PYTHON=/path/to/python3.11 ..." >&2
    exit 1
fi
exec "$found" scripts/set_up.py
