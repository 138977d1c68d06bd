"""Who is encoded, how long, where, and who holds on to it. Scheduler side: no tensors here.

The directory is also the page allocator of the slab: workers keep no record table of their own, every step's metadata
names the pages to read and write, and since steps run in order, a page freed in one step may be filled in the next.
"""

from __future__ import annotations

import hmac
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from inferscale_mem.errors import BudgetError
from inferscale_mem.types import Miss, Scope

PAGE_SIZE = 8
"""Tokens per page of the slab. A record wastes half a page on average; smaller pages make longer page lists."""

ABSENT = "no record yet"
CHANGED = "record was made for other tokens"
FOREIGN = "record belongs to another owner"
FORGED = "handle does not match its record"
BEHIND = "behind a segment that has to be prefilled"
LAST = "the last token of a prompt is always computed"
DROPPED = "dropped while it was being encoded"


def first_pages(tokens: int) -> tuple[int, ...]:
    """Where an empty directory puts a record of so many tokens."""
    return tuple(range(-(-tokens // PAGE_SIZE)))


Verify = Callable[[str, str, Scope], bool]
"""(handle, store, scope) -> whether the handle's tag is right."""


@dataclass(eq=False)
class Record:
    """One resident record, or one being encoded.

    Attributes:
        name: record id.
        token_ids: the tokens it was made from.
        pages: slab pages that hold it, in order.
        generation: never used twice: tells a record from an earlier one of the same name.
        handle, scope, store: whose fact it is; all None or "" for headers.
        pins: requests that are using it.
        ready: all ranks have reported it.
        dropped: no longer to be found by name; pages are freed with the last pin.
        erase: its bytes must be overwritten then, because what it says was deleted.
    """

    name: str
    token_ids: tuple[int, ...]
    pages: tuple[int, ...]
    generation: int
    handle: str | None
    scope: Scope | None
    store: str
    pins: int = 0
    ready: bool = False
    dropped: bool = False
    erase: bool = False


@dataclass(frozen=True)
class Wanted:
    """A segment of a request, as the directory sees it: its tokens and the record it asks for."""

    token_ids: tuple[int, ...]
    record: str | None
    handle: str | None


@dataclass(frozen=True)
class Match:
    """The longest run of leading segments that can be injected.

    Attributes:
        records: to inject, in order; their tokens are the first ``length`` tokens of the prompt.
        length: tokens.
        missed: the other segments that asked for a record.
    """

    records: tuple[Record, ...] = ()
    length: int = 0
    missed: tuple[Miss, ...] = ()


@dataclass
class Directory:
    """Records by name, least recently used first.

    Args:
        num_pages: pages of the slab.
        page_size: tokens per page.
        page_bytes: bytes per page, all layers of one rank.
        verify: checks a handle's tag; None where no key is configured.
    """

    num_pages: int
    page_size: int
    page_bytes: int
    verify: Verify | None = None
    counters: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._free = list(range(self.num_pages - 1, -1, -1))
        self._ready: OrderedDict[str, Record] = OrderedDict()
        self._pending: dict[int, Record] = {}
        self._generations = itertools.count(1)
        self._erased: list[int] = []

    # Looking up.

    def match(self, segments: Sequence[Wanted], scope: Scope | None, store: str) -> Match:
        """The longest run of leading segments whose records are ready, right and allowed. Changes nothing."""
        records: list[Record] = []
        missed: list[Miss] = []
        length = 0
        open_run = True
        for segment in segments:
            reason = self._refusal(segment, scope, store) if segment.record else None
            usable = segment.record is not None and reason is None
            if usable and open_run:
                record = self._ready[str(segment.record)]
                records.append(record)
                length += len(segment.token_ids)
                continue
            open_run = False
            if segment.record:
                missed.append(Miss(segment.handle or segment.record, reason or BEHIND))
        return Match(tuple(records), length, tuple(missed))

    def _refusal(self, segment: Wanted, scope: Scope | None, store: str) -> str | None:
        record = self._ready.get(segment.record or "")
        if record is None:
            return ABSENT
        if record.token_ids != segment.token_ids:
            return CHANGED
        if record.handle is None:
            return None
        if record.scope is None or scope is None or record.store != store or not scope.covers(record.scope):
            return FOREIGN
        # As bytes: what a request claims may hold anything, and compare_digest takes no other text than ASCII.
        claimed, right = (name.encode(errors="surrogatepass") for name in (segment.handle or "", record.handle))
        if not hmac.compare_digest(claimed, right):
            return FORGED
        return None

    def pin(self, records: Sequence[Record]) -> None:
        """Keep records from being evicted or overwritten, and mark them as used."""
        for record in records:
            record.pins += 1
            if not record.dropped and record.ready:
                self._ready.move_to_end(record.name)

    def unpin(self, records: Sequence[Record]) -> None:
        """Undo ``pin``; pages of a record dropped meanwhile become free with its last pin."""
        for record in records:
            record.pins -= 1
            if record.dropped and record.pins == 0:
                self._release(record)

    # Making and unmaking.

    def reserve(
        self, name: str, token_ids: Sequence[int], handle: str | None, scope: Scope | None, store: str
    ) -> Record:
        """Pages for a record about to be encoded, evicting the least recently used ones that nobody holds.

        Raises:
            BudgetError: it would not fit even if all unpinned records went, or its handle is forged.
        """
        if handle is not None and self.verify is not None and (scope is None or not self.verify(handle, store, scope)):
            self.counters["forged"] += 1
            raise BudgetError(FORGED)
        count = -(-len(token_ids) // self.page_size)
        if count > self.num_pages:
            raise BudgetError(
                f"a record of {len(token_ids)} tokens needs {count * self.page_bytes} bytes, the budget is "
                f"{self.num_pages * self.page_bytes}; raise engine.record_bytes"
            )
        for candidate in list(self._ready.values()):
            if len(self._free) >= count:
                break
            if candidate.pins == 0:
                self.counters["evicted"] += 1
                self._forget(candidate)
        if len(self._free) < count:
            raise BudgetError("every record in the budget is in use; try again, or raise engine.record_bytes")
        pages = tuple(self._free.pop() for _ in range(count))
        record = Record(name, tuple(token_ids), pages, next(self._generations), handle, scope, store)
        self._pending[record.generation] = record
        return record

    def publish(self, generation: int) -> None:
        """Make an encoded record findable, in place of an earlier one of its name. Unknown ones were abandoned."""
        record = self._pending.pop(generation, None)
        if record is None:
            return
        earlier = self._ready.get(record.name)
        if earlier is not None:
            self._forget(earlier)
        record.ready = True
        self._ready[record.name] = record
        self.counters["encoded"] += 1

    def install(self, name: str, token_ids: Sequence[int]) -> Record:
        """A record that is there from the start and stays, whatever else has no room; everybody may use it.

        It lies in ``first_pages``: workers put it there before anybody asks.

        Raises:
            BudgetError: it does not fit.
        """
        assert not self._ready and not self._pending, "it is installed before anything else"
        record = self.reserve(name, token_ids, None, None, "")
        assert record.pages == first_pages(len(token_ids))
        self._pending.pop(record.generation)
        record.ready = True
        self._ready[name] = record
        self.pin([record])
        return record

    def abandon(self, generation: int) -> None:
        """Give up on a record that is still being encoded."""
        record = self._pending.pop(generation, None)
        if record is not None:
            self._forget(record)

    def drop(self, names: Sequence[str]) -> int:
        """Forget records by handle or by name, those being encoded included; returns how many there were.

        Their pages are listed in ``take_erased`` as they become free.
        """
        doomed = set(names)
        found = [r for r in [*self._ready.values(), *self._pending.values()] if doomed & {r.handle, r.name}]
        for record in found:
            self._pending.pop(record.generation, None)
            record.erase = True
            self._forget(record)
        self.counters["dropped"] += len(found)
        return len(found)

    def _forget(self, record: Record) -> None:
        record.dropped = True
        if self._ready.get(record.name) is record:
            del self._ready[record.name]
        if record.pins == 0:
            self._release(record)

    def take_erased(self) -> list[int]:
        """Pages that dropped records have left since the last call: their bytes must be overwritten."""
        erased, self._erased = self._erased, []
        return erased

    def _release(self, record: Record) -> None:
        if record.erase:
            self._erased.extend(record.pages)
        self._free.extend(reversed(record.pages))
        record.pages = ()

    # Telling.

    @property
    def records(self) -> int:
        """Resident records."""
        return len(self._ready)

    @property
    def tokens(self) -> int:
        """Tokens in resident records."""
        return sum(len(record.token_ids) for record in self._ready.values())

    @property
    def bytes(self) -> int:
        """Bytes of all pages in use."""
        return (self.num_pages - len(self._free)) * self.page_bytes
