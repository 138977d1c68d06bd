"""What is bound to a chat model stays bound, whatever is made of it."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.load import dumps, loads
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableBinding
from pydantic import BaseModel
from recorder_helpers import ALICE, KEY, new_fact
from small_index import SmallIndex

from inferscale_mem.adapters.langchain import ChatInferScale
from inferscale_mem.adapters.langchain.binding import ChatBinding
from inferscale_mem.config import EncodingConfig
from inferscale_mem.errors import ConfigError, HandleError, InputError
from inferscale_mem.handles import HandleSigner
from inferscale_mem.service import MemoryService
from inferscale_mem.testing import FakeEngine
from inferscale_mem.types import PromptPlan, Sampling

QUESTION = "What is the name of my dog?"
Make = Callable[[ChatInferScale, list[str]], Runnable[Any, Any]]


class Dog(BaseModel):
    """A dog."""

    name: str


def weather(place: str) -> str:
    """The weather at a place."""
    return place


def author(plan: PromptPlan, sampling: Sampling) -> str:
    return "Rex." if sampling.json_schema is None else json.dumps({"name": "Rex"})


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine(author, key=KEY)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def service(engine: FakeEngine) -> Iterator[MemoryService]:
    signer = HandleSigner(KEY, "tests")
    service = MemoryService(engine, SmallIndex(signer), signer, EncodingConfig())
    yield service
    service.close()


@pytest.fixture(scope="module")
def handles(service: MemoryService) -> list[str]:
    fact = new_fact("My dog is called Rex.", ALICE)
    service.index.put(fact)  # type: ignore[attr-defined]
    return [service.handle(fact)]


@pytest.fixture
def chat(service: MemoryService) -> ChatInferScale:
    return ChatInferScale(service=service, max_tokens=50)


def served(engine: FakeEngine) -> bool:
    """Whether the latest prompt holds the memory."""
    return "My dog is called Rex." in engine.tokenizer.decode(engine.requests[-1][0].token_ids)


def config(handles: list[str]) -> dict[str, Any]:
    return {"configurable": {"memories": handles}}


MADE: dict[str, Make] = {
    "tools": lambda chat, handles: chat.bind(memories=handles).bind_tools([weather]),
    "tools, bound again": lambda chat, handles: (
        chat.bind(n=1).bind(memories=handles).bind_tools([weather]).bind(seed=1)
    ),
    "schema": lambda chat, handles: chat.bind(memories=handles).with_structured_output(Dog),
    "JSON schema": lambda chat, handles: chat.bind(memories=handles).with_structured_output(Dog, method="json_schema"),
    "raw": lambda chat, handles: chat.bind(memories=handles).with_structured_output(Dog, include_raw=True),
    "raw, bound": lambda chat, handles: chat.with_structured_output(Dog, include_raw=True).bind(memories=handles),
    "raw, in a chain": lambda chat, handles: (
        ChatPromptTemplate([("human", "{question}")])
        | chat.with_structured_output(Dog, include_raw=True).bind(memories=handles)
    ),
    "config": lambda chat, handles: chat.with_config(config(handles)).with_structured_output(Dog),
    "config, tools": lambda chat, handles: chat.with_config(config(handles)).bind_tools([weather]),
    "listeners": lambda chat, handles: (
        chat.with_listeners(on_end=lambda run: None).bind(memories=handles).bind_tools([weather])
    ),
    "async listeners": lambda chat, handles: (
        chat.bind(memories=handles).with_alisteners(on_end=None).bind_tools([weather])  # type: ignore[attr-defined]
    ),
    "types": lambda chat, handles: chat.with_types(output_type=Any).bind(memories=handles).with_structured_output(Dog),
    "retries": lambda chat, handles: chat.bind(memories=handles).bind_tools([weather]).with_retry(),
    "fallbacks": lambda chat, handles: (
        chat.bind(memories=handles).with_fallbacks([chat]).with_structured_output(Dog)  # type: ignore[attr-defined]
    ),
}


@pytest.mark.parametrize("name", MADE)
async def test_bound_memories_reach_the_model(
    name: str, chat: ChatInferScale, engine: FakeEngine, handles: list[str]
) -> None:
    made = MADE[name](chat, handles)
    asked = {"question": QUESTION} if "chain" in name else QUESTION
    for ask in (made.invoke, lambda asked: list(made.stream(asked)), lambda asked: made.batch([asked])):
        before = len(engine.requests)
        ask(asked)
        assert len(engine.requests) == before + 1 and served(engine)
    for wait in (made.ainvoke(asked), made.abatch([asked])):
        await wait
        assert served(engine)


@pytest.mark.parametrize(
    "made",
    [
        lambda chat: chat.with_structured_output(Dog),
        lambda chat: chat.with_structured_output(Dog, include_raw=True),
        lambda chat: chat.with_structured_output(Dog, method="json_schema", include_raw=True),
        lambda chat: chat.bind_tools([weather]),
    ],
)
async def test_memories_of_a_call_reach_the_model(
    made: Callable[[ChatInferScale], Runnable[Any, Any]], chat: ChatInferScale, engine: FakeEngine, handles: list[str]
) -> None:
    asked = made(chat)
    asked.invoke(QUESTION, memories=handles)
    assert served(engine)
    await asked.ainvoke(QUESTION, memories=handles)
    assert served(engine)
    list(asked.stream(QUESTION, memories=handles))
    assert served(engine)
    asked.invoke(QUESTION)
    assert not served(engine)


async def test_raw_and_parsed_answers_come_each_way(chat: ChatInferScale, handles: list[str]) -> None:
    made = chat.with_structured_output(Dog, include_raw=True).bind(memories=handles)
    told = [made.invoke(QUESTION), await made.ainvoke(QUESTION)]
    told.append(sum(itertools.islice(made.stream(QUESTION), 1, None), next(made.stream(QUESTION))))
    for answer in told:
        assert answer["raw"].response_metadata["inferscale"]["facts_requested"] == 1
        assert (answer["parsed"], answer["parsing_error"]) == (Dog(name="Rex"), None)


def test_what_is_bound_later_counts(chat: ChatInferScale, engine: FakeEngine) -> None:
    made = chat.bind(temperature=0.5, seed=1, tool_choice="none").bind_tools([weather], tool_choice="weather", seed=2)
    assert made.invoke(QUESTION).tool_calls
    assert (engine.requests[-1][1].temperature, engine.requests[-1][1].seed) == (0.5, 2)
    made.invoke(QUESTION, seed=3)
    assert engine.requests[-1][1].seed == 3


@pytest.mark.parametrize("method", ["function_calling", "json_schema", "json_mode"])
def test_a_schema_takes_the_place_of_tools_and_forms_that_are_bound(chat: ChatInferScale, method: Any) -> None:
    for bound in (
        chat.bind_tools([weather], tool_choice="any", temperature=0.5),
        chat.bind(response_format={"type": "json_object"}),
    ):
        assert bound.with_structured_output(Dog, method=method).invoke(QUESTION) == Dog(name="Rex")  # type: ignore[attr-defined]
        assert bound.kwargs.keys() & {"tools", "response_format"}, "and what it is made of stays as it is"  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")
def test_it_is_a_binding_as_langchain_has_it() -> None:
    chat = ChatInferScale(model="owner/name")
    made = chat.bind(seed=1).bind_tools([weather]).with_config(tags=["t"])
    assert isinstance(made, ChatBinding) and isinstance(made, RunnableBinding) and made.bound is chat
    again = pickle.loads(pickle.dumps(made))
    assert isinstance(again, ChatBinding) and again.kwargs == made.kwargs and again.config == made.config
    as_langchains = RunnableBinding(bound=chat, kwargs=made.kwargs, config=made.config)
    assert dumps(made) == dumps(as_langchains)
    loaded = loads(dumps(made), allowed_objects=[ChatInferScale, RunnableBinding], valid_namespaces=["inferscale_mem"])
    assert loaded.kwargs == made.kwargs and loaded.bound.asdict() == chat.asdict()


def test_documents_of_a_retriever_are_memories(chat: ChatInferScale, engine: FakeEngine, handles: list[str]) -> None:
    chat.invoke(QUESTION, memories=[Document(page_content=handle) for handle in handles])
    assert served(engine)
    with pytest.raises(HandleError, match=r"'Some text\.'.* no handle; .* a retriever returns"):
        chat.invoke(QUESTION, memories=[Document(page_content="Some text.")])


def test_max_completion_tokens_is_max_tokens(service: MemoryService, chat: ChatInferScale, engine: FakeEngine) -> None:
    made = ChatInferScale(service=service, max_completion_tokens=7)  # type: ignore[call-arg]
    assert made.max_tokens == 7
    made.invoke(QUESTION)
    assert engine.requests[-1][1].max_tokens == 7
    for asked in (chat, chat.bind(seed=1)):
        asked.invoke(QUESTION, max_completion_tokens=3, max_tokens=None)
        assert engine.requests[-1][1].max_tokens == 3
    with pytest.raises(InputError, match="give one of them"):
        chat.invoke(QUESTION, max_tokens=3, max_completion_tokens=4)
    with pytest.raises(ConfigError, match="give one of them"):
        ChatInferScale(service=service, max_tokens=3, max_completion_tokens=4)  # type: ignore[call-arg]


def test_options_may_have_the_names_of_other_providers(service: MemoryService, engine: FakeEngine) -> None:
    made = ChatInferScale(base_url="http://localhost:1/v1", model_name="a", stop_sequences=["b"], request_timeout=5)  # type: ignore[call-arg]
    assert (made.model, made.stop, made.timeout) == ("a", ["b"], 5)
    chat = ChatInferScale(service=service)
    chat.invoke(QUESTION, stop_sequences=["c"], model_name=engine.info.model)
    assert engine.requests[-1][1].stop == ("c",)
    with pytest.raises(InputError, match="open another engine"):
        chat.invoke(QUESTION, model_name="another")
    with pytest.raises(ConfigError, match="'max_token' is no option of ChatInferScale; did you mean 'max_tokens'"):
        ChatInferScale(max_token=3)  # type: ignore[call-arg]
