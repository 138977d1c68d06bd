"""Keeps the engine's records in step with the facts, in the background. Facts are durable, records are cache."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError
from functools import partial

from inferscale_mem.encoding import Policy
from inferscale_mem.errors import EngineAwayError, EngineClosedError, EngineError, InputError, ModelError
from inferscale_mem.handles import HandleSigner, check_lasting
from inferscale_mem.kv.directory import ABSENT, CHANGED
from inferscale_mem.prompt import PromptPlanner
from inferscale_mem.protocols import Engine, FactIndex
from inferscale_mem.recording.backoff import Retry
from inferscale_mem.recording.fact_encoder import FactEncoder, Outcome
from inferscale_mem.recording.headers import HeaderRecords
from inferscale_mem.recording.jobs import Job
from inferscale_mem.recording.ledger import Flight, Ledger, Progress
from inferscale_mem.recording.owed import OwedDrops
from inferscale_mem.types import Fact, InjectReport, PromptPlan, Segment

logger = logging.getLogger(__name__)

AWAY_S = 30.0
"""Longest pause in seconds before the engine is tried again, when it could not be reached."""

CLOSE_S = 30.0
"""Seconds that close() waits for the encode in flight."""


class Recorder:
    """One background thread that encodes facts, one after the other, and knows which are ready.

    Only ``remove``, ``ensure_headers``, ``wait`` and ``close`` wait for the engine. What an app removes, it removes
    from the index first: the index decides which facts exist, and is asked again right before each encode. Thread-safe.

    Args:
        engine: holds the records. Without a connector nothing is ever encoded, and nothing is ready.
        index: the durable facts.
        signer: mints their handles.
        planner: tokenises them.
        policy: what they are encoded behind.
        attempts: how often a fact is tried before it waits for the next ``add``.
        backoff_s: seconds before the second attempt after an error of the engine; doubles with each further one.
        owed: drops that an earlier process could not have done.
    """

    def __init__(
        self,
        engine: Engine,
        index: FactIndex,
        signer: HandleSigner,
        planner: PromptPlanner,
        policy: Policy,
        *,
        attempts: int = 3,
        backoff_s: float = 0.5,
        owed: OwedDrops | None = None,
    ) -> None:
        self._engine = engine
        self._signer = signer
        self._planner = planner
        info = engine.info
        self._connector = info.connector
        self._room = info.record_bytes // info.bytes_per_token if info.bytes_per_token > 0 else None
        self._headers = HeaderRecords(engine, backoff_s=backoff_s, room=self._room)
        self._encoder = FactEncoder(engine, index, signer, planner, policy, self._headers)
        self._state = threading.Condition()
        self._ledger = Ledger(planner.record_id, attempts=attempts, backoff_s=backoff_s)
        self._owed = OwedDrops() if owed is None else owed
        self._reach = Retry(backoff_s, AWAY_S)
        self._payment = Retry(backoff_s, AWAY_S)
        self._rebuild_wanted = False
        self._listing = False
        self._left = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    # What there is.

    def is_ready(self, record_id: str) -> bool:
        """Whether the engine has confirmed this record and nothing is known to have happened to it since."""
        return self._ledger.is_ready(record_id)

    @property
    def pending(self) -> int:
        """Facts queued or being encoded; listing facts for ``rebuild`` counts as one, and so do drops that are owed."""
        with self._state:
            return self._pending()

    @property
    def progress(self) -> Progress:
        """How far the current queue is."""
        with self._state:
            return self._ledger.progress

    @property
    def failures(self) -> dict[str, str]:
        """Handles of facts (and record ids of headers) without a record -> why. The facts themselves are safe."""
        with self._state:
            facts = self._ledger.failures
        return {**self._headers.failures, **facts}

    def failure(self, handle: str) -> str | None:
        """Why a fact has no record; None if it has one, is still to be encoded, or was never asked for."""
        with self._state:
            return self._ledger.failure(handle)

    def standing_on(self, handles: Iterable[str]) -> set[str]:
        """Lasting handles of further facts whose records have seen one of these: removing it has them made again."""
        with self._state:
            return self._ledger.standing_on(handles)

    @property
    def counters(self) -> Counter[str]:
        """What it has done since it was made.

        "encoded", "refused", "failed", "skipped" (gone from the index), "spoiled" (something it was made of was removed
        meanwhile), "again" (dropped and queued again), "evicted", "tokens_prefilled", "tokens_injected",
        "encode_us" (microseconds that the engine took).
        """
        with self._state:
            return Counter(self._ledger.counters)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is pending, at most ``timeout`` seconds; True if so and nothing was left undone."""
        with self._state:
            return self._state.wait_for(lambda: self._pending() == 0, timeout) and self._left == 0

    # What changes.

    def add(self, facts: Iterable[Fact]) -> None:
        """Encode these soon, oldest first; returns at once. After close() they wait for the next start's rebuild."""
        if not self._connector:
            return
        jobs = self._encoder.jobs(facts)
        with self._state:
            for job in jobs:
                self._ledger.pardon(job.handle)
            self._want(jobs)

    def remove(self, gone: Iterable[Fact | str]) -> None:
        """Forget the records of these facts (or lasting handles); returns when the engine has.

        Whatever has seen them while it was encoded is dropped too, and queued again; its facts stay known.

        Raises:
            HandleError: a string is not a lasting handle; nothing was removed.
            EngineError: the engine failed. The facts are not ready all the same, and it is asked again, in the
                background, until it has done it.
        """
        handles = list(dict.fromkeys(g if isinstance(g, str) else self._signer.mint(g) for g in gone))
        for handle in handles:
            check_lasting(handle)
        if not handles or not self._connector:
            return
        with self._state:
            doomed, again = self._ledger.withdraw(handles)
            self._state.notify_all()
        try:
            self._owed.note(doomed)
            self._engine.drop(doomed, alive=doomed[len(handles) :])
            self._owed.paid(doomed)
        except (EngineClosedError, CancelledError):
            logger.debug("The engine is closed; %d records are gone with it, or wait for the next start", len(doomed))
            self._owed.add(doomed)
        except BaseException:  # of the engine, or the caller was interrupted and the engine may not have done it
            self._owe(doomed)
            raise
        finally:
            with self._state:
                if not self._closed:
                    self._ledger.dropped(doomed, again)
                    self._wake()

    def recheck(self, handles: Iterable[str]) -> None:
        """The index did not find these: if records of theirs are still held, drop them, in the background."""
        with self._state:
            held = [job for handle in handles if (job := self._ledger.ready_job(handle))]
            self._want(held, known=True)

    @property
    def moment(self) -> int:
        """Taken before a request is handed to the engine, it tells ``observe`` what was ready by then."""
        return self._ledger.moment

    def observe(self, report: InjectReport, plan: PromptPlan, since: int | None = None) -> None:
        """Learn from a request which records the engine has lost, and encode what it asked for and had no record of.

        Only as much as fits beside the request's other records: more would push each other out, every time.

        Args:
            report: as the engine gave it.
            plan: of the request.
            since: the ``moment`` at which the request began; None: just now, so nothing was made meanwhile.
        """
        if not self._connector:
            return
        lost = {miss.handle for miss in report.missed if miss.reason in (ABSENT, CHANGED)}
        for segment in plan.segments:
            if segment.kind == "header" and segment.record in lost:
                self._headers.forget(segment.record)
        with self._state:
            if not self._closed:
                self._resume()
                self._ledger.want_asked(plan, lost, self._room, self._ledger.moment if since is None else since)
                self._wake()

    def ensure_headers(self, headers: Sequence[Segment]) -> int:
        """Wait until the records of a prompt's beginning are made, as far as that is possible now.

        Args:
            headers: segments of kind "header" from the prompt's first token on, each on top of those before it.

        Returns:
            How many of their tokens were computed for it.

        Raises:
            EngineClosedError: the engine is closed.
        """
        return self._headers.ensure_all(headers)[1]

    async def aensure_headers(self, headers: Sequence[Segment]) -> int:
        """As ensure_headers, on any event loop."""
        return (await self._headers.aensure_all(headers))[1]

    def rebuild(self) -> None:
        """Encode all live facts in the background, as far as the budget goes; ``jobs.rebuild_order`` is the order."""
        with self._state:
            if self._connector and not self._closed:
                self._rebuild_wanted = True
                self._wake()

    def close(self) -> None:
        """Stop after the encode in flight; safe to call twice. The engine stays open."""
        self._stop("closed")
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_S)
            if thread.is_alive():
                logger.warning("The encode in flight did not end within %g s of close(); it is left behind", CLOSE_S)

    # Called with the lock held.

    def _pending(self) -> int:
        return self._ledger.pending + self._rebuild_wanted + self._listing + self._owes()

    def _owes(self) -> bool:
        return self._connector and not self._closed and len(self._owed) > 0

    def _resume(self) -> None:
        """The engine answers."""
        if self._reach.failures:
            self._reach.worked()
            self._payment.worked()

    def _want(self, jobs: Iterable[Job], *, known: bool = False, backlog: bool = False) -> None:
        if self._closed:
            return
        for job in jobs:
            self._ledger.want(job, known=known, backlog=backlog)
        self._wake()

    def _wake(self) -> None:
        if self._thread is None and self._pending():
            self._thread = threading.Thread(target=self._work, name="inferscale-recorder", daemon=True)
            self._thread.start()
        self._state.notify_all()

    # The thread.

    def _work(self) -> None:
        try:
            while (step := self._next_step()) is not None:
                step()
        except (EngineClosedError, CancelledError):
            self._stop("the engine was closed")

    def _next_step(self) -> Callable[[], None] | None:
        with self._state:
            while not self._closed:
                if (left := self._reach.at - time.monotonic()) > 0:
                    self._state.wait(left)
                    continue
                if self._owes() and self._payment.at <= time.monotonic():
                    return self._pay
                if flight := self._ledger.begin(time.monotonic()):
                    return partial(self._encode, flight)
                if self._rebuild_wanted:
                    self._rebuild_wanted, self._listing = False, True
                    return self._list_backlog
                dues = [self._ledger.queue.rest_until(), self._payment.at if self._owes() else None]
                due = min((due for due in dues if due is not None), default=None)
                self._state.wait(None if due is None else max(0.0, due - time.monotonic()))
            return None

    def _pay(self) -> None:
        """Have the drops done that are owed. What was encoded meanwhile under these handles goes, and is made again."""
        owed = list(self._owed)
        try:
            self._engine.drop(owed, alive=self._encoder.alive(owed))
        except (EngineClosedError, CancelledError):
            raise
        except Exception as error:
            logger.debug("%d records cannot be dropped yet: %s", len(owed), error)
            self._owe(owed, away=isinstance(error, EngineAwayError))
            return
        self._owed.paid(owed)
        logger.info("The records of %d handles are dropped now", len(owed))
        with self._state:
            self._resume()
            self._payment.worked()
            self._ledger.dropped(owed, ())
            self._state.notify_all()

    def _owe(self, handles: Iterable[str], *, away: bool = False) -> None:
        """The engine could not drop these: it is asked again, later and later."""
        self._owed.add(handles)
        with self._state:
            self._payment.failed()
            if away:
                self._reach.failed()

    def _encode(self, flight: Flight) -> None:
        try:
            outcome = self._encoder.encode(flight.job, self.is_ready)
            if outcome is None:
                self._skip(flight)
            elif self._settle(flight, outcome):
                try:
                    self._engine.drop([flight.job.handle], alive=[] if flight.dead else [flight.job.handle])
                except EngineClosedError:
                    raise
                except EngineError:
                    self._owe([flight.job.handle])
                with self._state:
                    self._ledger.redo(flight)
        except (EngineClosedError, CancelledError):
            with self._state:
                if not flight.dead:
                    self._ledger.queue.put(flight.job)
            raise
        except EngineAwayError as error:
            with self._state:
                if not self._reach.failures:
                    logger.warning("Facts are encoded when the engine is back: %s", error)
                self._reach.failed()
                if not flight.dead:
                    self._ledger.queue.put(flight.job, first=True)
        except (InputError, ModelError) as error:
            self._fail(flight, str(error), final=True)
        except Exception as error:
            # Whatever it was, the next fact deserves its turn; this one's failure is kept, shown and retried.
            logger.debug("Encoding %s failed", flight.job.handle, exc_info=True)
            self._fail(flight, f"{type(error).__name__}: {error}")
        finally:
            with self._state:
                self._ledger.end()
                if self._closed:
                    self._leave()
                self._state.notify_all()

    def _skip(self, flight: Flight) -> None:
        """The index does not have the fact: should there be a record of it, it has to go."""
        with self._state:
            self._ledger.counters["skipped"] += 1
            held = self._ledger.ready_job(flight.job.handle) is not None
        if held:
            self.remove([flight.job.handle])

    def _settle(self, flight: Flight, outcome: Outcome) -> bool:
        """Note what came out; True if it must be dropped, because something it was made of was removed meanwhile."""
        with self._state:
            self._ledger.counters["encode_us"] += round(1e6 * outcome.seconds)
            self._ledger.counters["tokens_prefilled"] += outcome.tokens_prefilled
            self._ledger.counters["tokens_injected"] += outcome.tokens_injected
            if flight.spoiled(outcome.context):
                return True
            if outcome.refused is None:
                self._ledger.keep(flight, outcome.age, outcome.context)
            else:
                self._warn_once("refused", outcome.refused)
                self._ledger.refuse(flight, outcome.refused)
            return False

    def _fail(self, flight: Flight, reason: str, *, final: bool = False) -> None:
        with self._state:
            self._warn_once("failed", reason)
            self._ledger.fail(flight, reason, time.monotonic(), final=final)

    def _warn_once(self, kind: str, reason: str) -> None:
        if not self._ledger.counters[kind]:
            logger.warning("A fact could not be encoded (%s) and is served as text: %s", kind, reason)

    def _list_backlog(self) -> None:
        jobs: list[Job] = []
        try:
            jobs = self._encoder.backlog(self._room)
        except Exception:
            logger.exception("Facts cannot be listed; each is encoded when it is first asked for")
        finally:
            with self._state:
                self._listing = False
                self._want(jobs, backlog=True)
                self._state.notify_all()

    def _stop(self, why: str) -> None:
        with self._state:
            self._closed = True
            self._rebuild_wanted = False
            left = self._leave()
            self._state.notify_all()
        if left:
            logger.info("Stopped (%s) with %d facts not encoded; the next start's rebuild does it", why, left)

    def _leave(self) -> int:
        left = len(self._ledger.queue)
        self._ledger.queue.clear()
        self._left += left
        return left
