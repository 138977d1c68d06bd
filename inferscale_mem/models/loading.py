"""Models are loaded one at a time."""

from __future__ import annotations

import threading

LOADING = threading.RLock()
"""Hold this while a model is loaded in this process.

While transformers or vLLM load one, torch's default dtype is that model's, for all threads: two at once are made in
each other's dtype, and may leave the process with the wrong one.
"""
