from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from gated_engine import PATIENCE, GatedEngine, until

from inferscale_mem.errors import EngineAwayError, EngineClosedError, EngineError
from inferscale_mem.recording.headers import KEPT, HeaderRecords
from inferscale_mem.testing import FakeEngine
from inferscale_mem.types import EncodePlan, Segment


@pytest.fixture
def engine() -> Iterator[GatedEngine]:
    made = GatedEngine(FakeEngine())
    yield made
    made.encodes.open()
    made.close()


@pytest.fixture
def headers(engine: GatedEngine) -> HeaderRecords:
    return HeaderRecords(engine, backoff_s=0.0, room=1000)


def header(name: str = "system", tokens: int = 12) -> Segment:
    return Segment("header", tuple(range(tokens)), f"header.{name}")


def test_a_header_is_encoded_once_and_then_known(engine: GatedEngine, headers: HeaderRecords) -> None:
    assert [headers.ensure(header()) for _ in range(3)] == [True, True, True]
    assert engine.headers == ["header.system"]
    assert engine.status().records == 1


async def test_both_faces_share_what_is_known(engine: GatedEngine, headers: HeaderRecords) -> None:
    assert await headers.aensure(header("a")) and headers.ensure(header("a"))
    assert headers.ensure(header("b")) and await headers.aensure(header("b"))
    assert engine.headers == ["header.a", "header.b"]


def test_threads_and_loops_that_ask_at_once_share_one_encode(engine: GatedEngine, headers: HeaderRecords) -> None:
    engine.encodes.shut()

    async def several() -> list[bool]:
        return list(await asyncio.gather(*(headers.aensure(header()) for _ in range(4))))

    with ThreadPoolExecutor(8) as pool:
        blocking = [pool.submit(headers.ensure, header()) for _ in range(4)]
        loops = [pool.submit(asyncio.run, several()) for _ in range(2)]
        engine.encodes.arrival()
        engine.encodes.open()
        assert all(future.result(PATIENCE) for future in blocking)
        assert all(all(future.result(PATIENCE)) for future in loops)
    assert engine.headers == ["header.system"]


async def test_a_cancelled_caller_leaves_the_work_to_those_who_wait(
    engine: GatedEngine, headers: HeaderRecords
) -> None:
    engine.encodes.shut()
    first = asyncio.create_task(headers.aensure(header()))
    await asyncio.to_thread(engine.encodes.arrival)
    second = asyncio.create_task(headers.aensure(header()))
    third = asyncio.create_task(asyncio.to_thread(headers.ensure, header()))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    engine.encodes.open()
    assert await second and await third


async def test_a_waiter_that_is_cancelled_cancels_nobody_else(engine: GatedEngine, headers: HeaderRecords) -> None:
    engine.encodes.shut()
    first = asyncio.create_task(headers.aensure(header()))
    await asyncio.to_thread(engine.encodes.arrival)
    second = asyncio.create_task(headers.aensure(header()))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    engine.encodes.open()
    assert await first
    assert engine.headers == ["header.system"]


def test_a_header_that_changes_with_every_request_takes_no_memory(engine: GatedEngine, headers: HeaderRecords) -> None:
    for minute in range(3 * KEPT):
        assert headers.ensure(header(f"it is {minute} past"))
        assert headers.ensure(header("steady"))
    assert len(headers) == KEPT
    assert engine.headers.count("header.steady") == 1, "what is in use is not forgotten"
    assert headers.ensure(header("it is 0 past")), "known again, although the engine has it still"


def test_a_forgotten_header_is_made_again(engine: GatedEngine, headers: HeaderRecords) -> None:
    headers.ensure(header())
    headers.forget("header.system")
    headers.forget("header.unknown")
    assert headers.ensure(header())
    assert len(engine.headers) == 2


def test_a_header_being_made_is_not_forgotten(engine: GatedEngine, headers: HeaderRecords) -> None:
    engine.encodes.shut()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(headers.ensure, header())
        engine.encodes.arrival()
        headers.forget("header.system")
        second = pool.submit(headers.ensure, header())
        engine.encodes.open()
        assert first.result(PATIENCE) and second.result(PATIENCE)
    assert len(engine.headers) == 1


def test_a_header_beyond_the_budget_is_not_even_tried(
    engine: GatedEngine, headers: HeaderRecords, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3 * KEPT):
        assert not headers.ensure(header(str(number), tokens=1001))
    assert engine.headers == []
    assert len(headers.failures) == KEPT and "1001 tokens" in next(iter(headers.failures.values()))
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1


def test_nothing_is_made_without_a_connector_or_for_text_that_has_no_record() -> None:
    engine = GatedEngine(FakeEngine(connector=False))
    headers = HeaderRecords(engine, backoff_s=0.0, room=None)
    assert not headers.ensure(header())
    assert engine.plans == []
    engine.close()
    engine = GatedEngine(FakeEngine())
    headers = HeaderRecords(engine, backoff_s=0.0, room=None)
    assert not headers.ensure(Segment("header", (1, 2)))
    assert not headers.ensure(Segment("header", (), "header.empty"))
    assert engine.plans == []
    engine.close()


async def test_a_refused_header_is_tried_again_later_not_at_once(engine: GatedEngine) -> None:
    patient = HeaderRecords(engine, backoff_s=3600.0, room=None)
    engine.refuse = lambda plan: "every record in the budget is in use"
    assert not patient.ensure(header())
    assert not patient.ensure(header()) and not await patient.aensure(header())
    assert len(engine.headers) == 1
    assert patient.failures == {"header.system": "every record in the budget is in use"}
    eager = HeaderRecords(engine, backoff_s=0.0, room=None)
    assert not eager.ensure(header())
    engine.refuse = lambda plan: None
    assert await eager.aensure(header())
    assert eager.failures == {}


def test_an_engine_error_costs_the_record_not_the_request(engine: GatedEngine, headers: HeaderRecords) -> None:
    def hiccup(plan: EncodePlan) -> None:
        raise EngineError("hiccup")

    engine.fail = hiccup
    assert not headers.ensure(header())
    assert headers.failures == {"header.system": "hiccup"}


def test_a_header_longer_than_the_models_context_costs_the_record_only() -> None:
    engine = FakeEngine(max_model_len=100)
    headers = HeaderRecords(engine, backoff_s=0.0, room=None)
    assert not headers.ensure(header(tokens=101))
    assert "does not fit the model's context" in headers.failures["header.system"]
    engine.close()


async def test_a_closed_engine_is_an_error_for_all_who_wait(engine: GatedEngine, headers: HeaderRecords) -> None:
    engine.encodes.shut()
    first = asyncio.create_task(asyncio.to_thread(headers.ensure, header()))
    await asyncio.to_thread(engine.encodes.arrival)
    second = asyncio.create_task(headers.aensure(header()))
    await asyncio.sleep(0)
    engine.close()
    engine.encodes.open()
    for task in (first, second):
        with pytest.raises(EngineClosedError):
            await task
    assert headers.failures == {}


def test_an_unexpected_error_reaches_the_caller_and_frees_those_who_wait(
    engine: GatedEngine, headers: HeaderRecords
) -> None:
    def broken(plan: EncodePlan) -> None:
        raise ZeroDivisionError

    engine.fail = broken
    engine.encodes.shut()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(headers.ensure, header())
        engine.encodes.arrival()
        second = pool.submit(headers.ensure, header())
        engine.encodes.open()
        for future in (first, second):
            with pytest.raises(ZeroDivisionError):
                future.result(PATIENCE)
    engine.fail = lambda plan: None
    assert headers.ensure(header())


def test_an_engine_that_was_away_for_long_is_not_waited_for_longer(engine: GatedEngine) -> None:
    headers, asked = HeaderRecords(engine, backoff_s=0.01, room=1000), []

    def away(plan: EncodePlan) -> None:
        asked.append(plan)
        raise EngineAwayError("No server")

    engine.fail = away
    until(lambda: headers.ensure(header()) or len(asked) > 20)  # 0.01 s doubled so often are three hours
    engine.fail = lambda plan: None
    until(lambda: headers.ensure(header()))
