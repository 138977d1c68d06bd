"""Callers: threads, event loops, and what comes after close."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from inferscale_mem.errors import EngineClosedError, InferScaleError
from inferscale_mem.protocols import Engine
from inferscale_mem.testing.scene import (
    FIRST_TOKEN,
    GREEDY,
    Answer,
    Scene,
    Segment,
    Span,
    collect,
    difference,
    raises,
)
from inferscale_mem.types import EncodePlan, PromptPlan, Sampling, Scope

THREADS = 8


class CallerConformance:
    """See ``conformance.EngineConformance``."""

    batch_tolerance = 1e-3

    def test_any_event_loop_gets_the_same_answer(self, engine: Engine) -> None:
        scene = Scene(engine)
        memories = scene.memories(2)
        scene.encode_header()
        plan = scene.plan(memories)

        async def encode_and_ask() -> Answer:
            segments = plan.segments[:-1]
            start, end = len(segments[0].token_ids), sum(len(segment.token_ids) for segment in segments)
            middle = start + len(segments[1].token_ids)
            first, second = memories
            spans = (
                Span(first.record, start, middle, first.handle, first.scope),
                Span(second.record, middle, end, second.handle, second.scope),
            )
            unread = (segments[0], *(Segment("fact", s.token_ids, None, s.handle) for s in segments[1:]))
            report = await engine.aencode(EncodePlan(unread, spans, plan.scope, plan.store))
            assert report.encoded == (first.record, second.record)
            return collect([chunk async for chunk in engine.agenerate(plan, GREEDY)], plan)

        async def forget() -> None:
            await engine.adrop([memory.handle for memory in memories])

        first, second = asyncio.run(encode_and_ask()), asyncio.run(encode_and_ask())
        assert first.tokens == second.tokens == scene.ask(plan).tokens
        assert first.report.facts_injected == second.report.facts_injected == 2
        asyncio.run(forget())
        assert scene.ask(plan).report.facts_injected == 0

    def test_many_requests_on_one_event_loop(self, engine: Engine) -> None:
        scene = Scene(engine)
        memories = scene.memories(3)
        scene.encode_all(memories)
        plan = scene.plan(memories)

        async def ask() -> Answer:
            return collect([chunk async for chunk in engine.agenerate(plan, GREEDY)], plan)

        async def ask_all() -> list[Answer]:
            return list(await asyncio.gather(*(ask() for _ in range(6))))

        assert [answer.report.facts_injected for answer in asyncio.run(ask_all())] == [3] * 6

    def test_a_cancelled_caller_leaves_the_engine_usable(self, engine: Engine) -> None:
        scene = Scene(engine)
        plan = scene.plan([])
        expected = scene.ask(plan).tokens
        started = threading.Event()

        async def listen() -> None:
            chunks = cast(Any, engine.agenerate(plan, Sampling(max_tokens=100, temperature=0.0, ignore_eos=True)))
            async for _ in chunks:
                started.set()

        async def cancel() -> None:
            task = asyncio.ensure_future(listen())
            while not started.is_set():
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        asyncio.run(cancel())
        assert scene.ask(plan).tokens == expected

    def test_owners_at_once_get_what_they_get_alone(self, engine: Engine) -> None:
        scenes = [Scene(engine) for _ in range(THREADS)]
        owned = [scene.memories(2, Scope(user_id=f"user{i}")) for i, scene in enumerate(scenes)]

        def work(i: int) -> Answer:
            scene, memories = scenes[i], owned[i]
            scene.encode_all(memories)
            return scene.ask(scene.plan(memories, scope=memories[0].scope), FIRST_TOKEN)

        with ThreadPoolExecutor(THREADS) as threads:
            together = list(threads.map(work, range(THREADS)))
        for i, answer in enumerate(together):
            alone = scenes[i].ask(scenes[i].plan(owned[i], scope=owned[i][0].scope), FIRST_TOKEN)
            assert answer.report.facts_injected == alone.report.facts_injected == 2
            assert difference(answer, alone) < self.batch_tolerance

    def test_records_may_come_and_go_while_others_ask(self, engine: Engine) -> None:
        scene = Scene(engine)
        stays, goes = scene.memories(2)
        scene.encode_all([stays])
        expected = scene.ask(scene.plan([stays])).tokens

        def churn(_: int) -> None:
            scene.encode([goes])
            engine.drop([goes.handle])

        def ask(_: int) -> Answer:
            return scene.ask(scene.plan([stays]))

        with ThreadPoolExecutor(4) as threads:
            churned = [threads.submit(churn, i) for i in range(6)]
            answers = list(threads.map(ask, range(6)))
            for future in churned:
                future.result()
        assert all(answer.report.facts_injected == 1 for answer in answers)
        assert scene.ask(scene.plan([stays])).tokens == expected
        assert scene.ask(scene.plan([goes])).report.facts_injected == 0

    def test_after_close_there_is_an_error_and_no_hang(self, make_engine: Callable[..., Engine]) -> None:
        engine = make_engine()
        scene = Scene(engine)
        memory = scene.memory("Likes doors.")
        plan = scene.plan([memory])
        under_way = iter(engine.generate(plan, Sampling(max_tokens=200, temperature=0.0, ignore_eos=True)))
        next(under_way)
        waiting: list[BaseException] = []
        listener = threading.Thread(target=_listen, args=(engine, plan, waiting))
        listener.start()
        engine.close()
        engine.close()
        listener.join(60)
        assert not listener.is_alive()
        assert not waiting or isinstance(waiting[0], InferScaleError), waiting
        with raises(EngineClosedError):
            list(under_way)
        with raises(EngineClosedError):
            list(engine.generate(plan, GREEDY))
        with raises(EngineClosedError):
            scene.encode([memory])
        with raises(EngineClosedError):
            engine.drop([memory.handle])
        with raises(EngineClosedError):
            engine.status()
        with raises(EngineClosedError):
            asyncio.run(engine.adrop([memory.handle]))


def _listen(engine: Engine, plan: PromptPlan, errors: list[BaseException]) -> None:
    try:
        list(engine.generate(plan, Sampling(max_tokens=200, temperature=0.0, ignore_eos=True)))
    except BaseException as error:
        errors.append(error)
