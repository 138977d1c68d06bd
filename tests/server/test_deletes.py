"""What a server knows of facts that are deleted: its own table behind a memory's service, without the network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import pytest
from gated_engine import PATIENCE
from recorder_helpers import ALICE, KEY, new_fact
from small_index import SmallIndex

from inferscale_mem import wire
from inferscale_mem.config import EncodingConfig
from inferscale_mem.errors import EngineAwayError
from inferscale_mem.handles import HandleSigner
from inferscale_mem.recording.owed import OwedDrops
from inferscale_mem.remote import Announced, Announcement
from inferscale_mem.server.facts import FactTable, Known
from inferscale_mem.service import MemoryService
from inferscale_mem.testing import FakeEngine
from inferscale_mem.types import EncodePlan, EncodeReport, Fact


class Served(FakeEngine):
    """Tells a server's table what the server's routes would."""

    def __init__(self) -> None:
        super().__init__(key=KEY)
        self.table = FactTable(KEY)
        self.on_the_way: Callable[[], None] = lambda: None
        self.away = False

    def announce(self, announcement: Announcement) -> Announced:
        self.on_the_way()
        return self.table.announce(Announcement.from_bytes(announcement.to_bytes()))

    async def _drop(self, handles: Sequence[str], alive: Collection[str]) -> None:
        if self.away:
            raise EngineAwayError("No server")
        await super()._drop(handles, alive)
        self.table.note(wire.drop_params(handles, alive), {})

    async def _encode(self, plan: EncodePlan) -> EncodeReport:
        report = await super()._encode(plan)
        self.table.note(wire.encode_params(plan), {"encoded": list(report.encoded)})
        return report


class House:
    def __init__(self, owed: OwedDrops | None = None) -> None:
        self.engine = Served()
        self.signer = HandleSigner(KEY, "tests")
        self.index = SmallIndex(self.signer)
        self.service = self.new_service(owed)

    def new_service(self, owed: OwedDrops | None = None) -> MemoryService:
        return MemoryService(self.engine, self.index, self.signer, EncodingConfig(), owed=owed)

    def add(self, *facts: Fact) -> None:
        """One after the other, each behind those before it."""
        for fact in facts:
            self.index.put(fact)
            self.service.add([fact])
            assert self.service.wait(PATIENCE)

    def known(self, *facts: Fact) -> list[bool]:
        return [isinstance(self.engine.table.get(self.signer.mint(fact)), Known) for fact in facts]

    def ready(self, *facts: Fact) -> list[bool]:
        records = [self.service.planner.record_id(self.signer.mint(fact)) for fact in facts]
        return [self.engine.table.is_ready(record) for record in records]


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    yield made
    made.service.close()
    made.engine.close()


def test_only_the_deleted_facts_handle_is_forgotten(house: House) -> None:
    rex, mia, pip = new_fact("The dog is Rex."), new_fact("The cat is Mia."), new_fact("The bird is Pip.")
    house.add(rex, mia, pip)
    house.engine.pause_encoding()
    house.index.take(rex)
    house.service.remove([rex])
    assert house.known(rex, mia, pip) == [False, True, True]
    assert house.ready(rex, mia, pip) == [False, False, False], "what has seen Rex is served as text"
    house.engine.resume_encoding()
    assert house.service.wait(PATIENCE)
    assert house.known(rex, mia, pip) == house.ready(rex, mia, pip) == [False, True, True]


def test_what_is_spoiled_while_it_is_encoded_stays_known(house: House) -> None:
    rex, mia = new_fact("The dog is Rex."), new_fact("The cat is Mia.")
    house.add(rex)
    house.engine.pause_encoding()
    house.index.put(mia)
    house.service.add([mia])
    while len(house.engine.encodes) < 3:  # the header, Rex, Mia
        pass
    house.index.take(rex)
    house.service.remove([rex])
    house.engine.resume_encoding()
    assert house.service.wait(PATIENCE)
    assert house.service.recorder.counters["spoiled"] == 1
    assert house.known(rex, mia) == house.ready(rex, mia) == [False, True]


def test_drops_that_are_paid_later_forget_no_more(tmp_path: Path) -> None:
    path = tmp_path / "owed.db"
    house = House(OwedDrops(path))
    rex, mia = new_fact("The dog is Rex."), new_fact("The cat is Mia.")
    house.add(rex, mia)
    house.engine.away = True
    house.index.take(rex)
    with pytest.raises(EngineAwayError):
        house.service.remove([rex])
    house.service.close()
    assert len(OwedDrops(path)) == 2 and house.known(rex, mia) == [True, True]
    house.engine.away = False
    house.service = house.new_service(OwedDrops(path))
    house.service.recorder.rebuild()
    assert house.service.wait(PATIENCE)
    assert house.known(rex, mia) == house.ready(rex, mia) == [False, True]
    house.service.close()
    house.engine.close()


def test_an_announcement_that_a_delete_overtakes_does_not_bring_the_fact_back(house: House) -> None:
    rex, mia = new_fact("The dog is Rex."), new_fact("The cat is Mia.")
    house.add(rex, mia)
    under_way, deleted = threading.Event(), threading.Event()

    def overtaken() -> None:
        under_way.set()
        assert deleted.wait(PATIENCE)

    house.engine.on_the_way = overtaken
    search = threading.Thread(target=house.service.announce, args=([rex, mia],))
    search.start()
    assert under_way.wait(PATIENCE)
    house.index.take(rex)
    house.service.remove([rex])
    deleted.set()
    search.join()
    assert house.known(rex, mia) == [False, True]


def test_what_comes_back_is_announced_again(house: House) -> None:
    """An expiry that was moved, or a drop by a process that knew less."""
    rex = new_fact("The dog is Rex.")
    house.add(rex)
    house.index.take(rex)
    house.service.remove([rex])
    house.service.announce([rex])
    assert house.known(rex) == [False]
    house.index.put(rex)
    house.service.add([rex])
    assert house.service.wait(PATIENCE)
    assert house.known(rex) == house.ready(rex) == [True]


def test_a_delete_between_the_look_and_the_second_announcement(house: House) -> None:
    rex = new_fact("The dog is Rex.", ALICE)
    house.add(rex)
    house.service.remove([rex])  # known as gone, although it is there
    asked = house.index.by_handle_id

    def asked_too_early(handle_id: str) -> Fact | None:
        found = asked(handle_id)
        house.index.by_handle_id = asked  # type: ignore[method-assign]
        house.index.take(rex)
        house.service.remove([rex])
        return found

    house.index.by_handle_id = asked_too_early  # type: ignore[method-assign]
    house.service.announce([rex])
    assert house.known(rex) == [False]
