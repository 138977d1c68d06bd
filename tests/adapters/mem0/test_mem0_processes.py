"""One memory and several processes: what is shared, what is refused, and that each says so."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mem0_helpers import texts

from inferscale_mem import InferScaleMemory
from inferscale_mem.errors import ConfigError

ALICE = {"user_id": "alice"}

FORK = """
import os, sys
from inferscale_mem import AsyncInferScaleMemory, InferScaleMemory
from inferscale_mem.errors import StoreError, StoreLockedError
from inferscale_mem.testing import FakeEngine

memory = InferScaleMemory(engine=FakeEngine())
memory.add("I live in Lyon.", user_id="alice", infer=False)
memory.service.wait(60)
child = os.fork()
if child == 0:
    calls = [
        lambda: memory.add("I live in Oslo.", user_id="alice", infer=False),
        lambda: memory.search("where", filters={"user_id": "alice"}),
        lambda: memory.get_all(filters={"user_id": "alice"}),
        lambda: memory.delete_all(user_id="alice"),
        lambda: memory.service,
    ]
    for call in calls:
        try:
            call()
            print("NOT REFUSED", flush=True)
        except StoreError as error:
            assert "before the process forked" in str(error), error
    try:
        InferScaleMemory(engine=FakeEngine())
        print("TWO PROCESSES AT ONE STORE", flush=True)
    except StoreLockedError:
        pass
    with InferScaleMemory(inferscale={"home": os.environ["INFERSCALE_HOME"] + "-child"}, engine=FakeEngine()) as other:
        other.add("I live in Oslo.", user_id="alice", infer=False)
        print("child", [m["memory"] for m in other.get_all(filters={"user_id": "alice"})["results"]], flush=True)
    memory.close()
    del memory, calls, call
    sys.exit(0)  # in good order: everything is torn down here
print("status", os.waitpid(child, 0)[1], flush=True)
try:
    InferScaleMemory(engine=FakeEngine())
    print("THE CHILD HAS RELEASED THE LOCK", flush=True)
except StoreLockedError:
    pass
memory.add("I have two cats.", user_id="alice", infer=False)
assert memory.service.wait(60)
print("parent", sorted(m["memory"] for m in memory.get_all(filters={"user_id": "alice"})["results"]), flush=True)
memory.close()
with InferScaleMemory(engine=FakeEngine()) as memory:
    print("again", len(memory.get_all(filters={"user_id": "alice"})["results"]), flush=True)
"""

ANOTHER = """
from inferscale_mem import InferScaleMemory
from inferscale_mem.testing import FakeEngine
with InferScaleMemory(engine=FakeEngine()) as memory:
    print([m["memory"] for m in memory.get_all(filters={"user_id": "alice"})["results"]])
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    """A program of its own; ended, with its children, should it hang."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", program], start_new_session=True, **pipes)
    try:
        out, err = process.communicate(timeout=200)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_leaves_the_memory_to_the_parent() -> None:
    done = run(FORK)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "child ['I live in Oslo.']",
        "status 0",
        "parent ['I have two cats.', 'I live in Lyon.']",
        "again 2",
    ], done.stderr


def test_another_process_is_refused_while_the_store_is_open(memory: InferScaleMemory) -> None:
    memory.add("I live in Lyon.", infer=False, **ALICE)
    refused = run(ANOTHER)
    assert refused.returncode == 1 and "StoreLockedError" in refused.stderr and "in use" in refused.stderr
    memory.close()
    assert run(ANOTHER).stdout == "['I live in Lyon.']\n"


def test_a_memory_is_not_sent_to_another_process(memory: InferScaleMemory) -> None:
    for send in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(ConfigError, match="open one there"):
            send(memory)


def test_two_memories_in_one_process(open_memory: Any, tmp_path: Path) -> None:
    """Different folders: they know nothing of each other, and their handles are worth nothing there."""
    memories = [open_memory(inferscale={"home": str(tmp_path / name)}) for name in ("one", "two")]
    for memory, city in zip(memories, ("Lyon", "Oslo"), strict=True):
        memory.add(f"I live in {city}.", infer=False, **ALICE)
    handles = [texts(memory.search("where I live", filters=ALICE)) for memory in memories]
    assert [memories[0].resolve(each) for each in handles] == [["I live in Lyon."], handles[1]]
    assert [memories[1].resolve(each) for each in handles] == [handles[0], ["I live in Oslo."]]
    memories[0].close()
    assert texts(memories[1].get_all(filters=ALICE)) == ["I live in Oslo."]
