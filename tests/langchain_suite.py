"""LangChain's integration tests, all of them, and what they leave out; written once for every way to an engine.

A module that runs them subclasses ``ChatModelSuite`` and gives ``chat_model_params``.
"""

from __future__ import annotations

from typing import Any, cast

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage
from langchain_core.tools import tool
from langchain_tests.integration_tests import ChatModelIntegrationTests
from pydantic import BaseModel, Field
from recorder_helpers import ALICE, new_fact
from small_index import SmallIndex

from inferscale_mem.adapters.langchain import ChatInferScale
from inferscale_mem.config import EncodingConfig
from inferscale_mem.errors import InputError, PromptTooLongError
from inferscale_mem.handles import HandleSigner
from inferscale_mem.service import MemoryService
from inferscale_mem.testing.scene import KEY

QUESTION = "Name three colours."


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=130)


@tool
def get_weather(place: str) -> str:
    """Weather at a place."""
    return f"Dry in {place}."


@tool
def get_time() -> str:
    """The time of day."""
    return "noon"


async def each_way(chat: Any, asked: Any) -> list[AIMessage]:
    """The answer of invoke, ainvoke, stream and astream."""
    streamed = list(chat.stream(asked))
    astreamed = [chunk async for chunk in chat.astream(asked)]
    for chunks in (streamed, astreamed):
        assert sum(chunk.usage_metadata is not None for chunk in chunks) == 1
    return [chat.invoke(asked), await chat.ainvoke(asked), joined(streamed), joined(astreamed)]


def joined(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    """The pieces of a stream as one message."""
    return cast(AIMessageChunk, sum(chunks[1:], start=chunks[0]))


class ChatModelSuite(ChatModelIntegrationTests):
    """On the packaged model of 135M parameters, greedy."""

    sampling = {"temperature": 0.0, "max_tokens": 96}  # noqa: RUF012

    @property
    def chat_model_class(self) -> type[ChatInferScale]:
        return ChatInferScale

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        """An engine runs one model; a call that names another is refused, see ``test_another_model_is_refused``."""
        return False

    @property
    def supported_usage_metadata_details(self) -> Any:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        """An answer with a memory that was injected."""
        chat = ChatInferScale(**self.chat_model_params)
        signer = HandleSigner(KEY, "langchain")
        index = SmallIndex(signer)
        service = MemoryService(chat._service.engine, index, signer, EncodingConfig())
        fact = new_fact("My dog is called Biscuit.", ALICE)
        index.put(fact)
        service.add([fact])
        assert service.wait(120)
        asker = ChatInferScale(service=service, **self.sampling).bind(memories=[service.handle(fact)])
        asked = [HumanMessage("What is the name of my dog?")]
        answer = joined(list(asker.stream(asked))) if stream else asker.invoke(asked)
        assert answer.response_metadata["inferscale"]["facts_injected"] == 1
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["input_token_details"]["cache_read"] > 0
        service.close()
        return answer

    @pytest.mark.xfail(reason="135M parameters: told in words which keys the JSON should have, it writes others")
    def test_json_mode(self, model: BaseChatModel) -> None:
        super().test_json_mode(model)

    @pytest.mark.xfail(reason="135M parameters: left to choose, it does not call the tool")
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)

    # What LangChain's own tests leave out.

    async def test_each_way_says_and_reports_the_same(self, model: ChatInferScale) -> None:
        answers = await each_way(model.bind(max_tokens=24), QUESTION)
        assert len({answer.content for answer in answers}) == 1 and answers[0].content
        for answer in answers:
            assert answer.usage_metadata == answers[0].usage_metadata
            said = answer.response_metadata
            assert said["finish_reason"] == answers[0].response_metadata["finish_reason"]
            assert (said["inferscale"]["facts_requested"], said["inferscale"]["missed"]) == (0, [])
            assert said["inferscale"]["ttft_ms"] > 0

    async def test_tokens_are_counted_as_they_are(self, model: ChatInferScale) -> None:
        for answer in await each_way(model.bind(max_tokens=5), QUESTION):
            usage = answer.usage_metadata
            assert usage is not None
            assert usage["input_tokens"] == model.get_num_tokens_from_messages([HumanMessage(QUESTION)])
            assert usage["output_tokens"] == 5
            assert answer.response_metadata["finish_reason"] == "length"

    async def test_stop_strings_end_each_way(self, model: ChatInferScale) -> None:
        whole = str(model.invoke(QUESTION).content)
        stop = whole.split()[3]
        assert whole.index(stop) > 0
        for answer in await each_way(model.bind(stop=[stop]), QUESTION):
            assert answer.content == whole[: whole.index(stop)]
            assert answer.response_metadata["finish_reason"] == "stop"

    def test_n_answers_are_paid_once(self, model: ChatInferScale) -> None:
        result = model.generate([[HumanMessage(QUESTION)]], n=3, temperature=1.5, seed=1, max_tokens=16)
        messages = [cast(AIMessage, cast(Any, generation).message) for generation in result.generations[0]]
        assert len({message.content for message in messages}) == 3
        usage = [message.usage_metadata for message in messages]
        assert usage[0] is not None and usage[0]["output_tokens"] > 16 and usage[1:] == [None, None]

    async def test_a_seed_fixes_the_answer(self, model: ChatInferScale) -> None:
        def drawn(seed: int) -> Any:
            return model.bind(temperature=1.5, seed=seed, max_tokens=16)

        answers = await each_way(drawn(7), QUESTION)
        assert len({answer.content for answer in answers}) == 1
        assert drawn(8).invoke(QUESTION).content != answers[0].content

    async def test_log_probs_come_per_token_each_way(self, model: ChatInferScale) -> None:
        for answer in await each_way(model.bind(max_tokens=6, logprobs=True, top_logprobs=3), QUESTION):
            entries = answer.response_metadata["logprobs"]["content"]
            assert len(entries) == 6
            assert "".join(entry["token"] for entry in entries).strip() == str(answer.content).strip()
            for entry in entries:
                best = entry["top_logprobs"]
                assert len(best) == 3 and best[0]["token_id"] == entry["token_id"]  # greedy
                assert 0 >= best[0]["logprob"] == entry["logprob"] >= best[1]["logprob"] >= best[2]["logprob"]

    async def test_reasoning_is_kept_apart(self, model: ChatInferScale) -> None:
        """The packaged model does not reason; shown how, it does as it is shown."""
        shown: list[BaseMessage] = []
        for number, word in enumerate(("one", "two", "three")):
            shown += [HumanMessage(word), AIMessage(f"<think>The word is {word}.</think>{number + 1}")]
        for answer in await each_way(model, [*shown, HumanMessage("four")]):
            assert "four" in answer.additional_kwargs["reasoning_content"]
            assert answer.content and "think" not in str(answer.content)

    @pytest.mark.parametrize("method", ["function_calling", "json_schema"])
    async def test_structured_output_fits_by_either_method(self, model: ChatInferScale, method: Any) -> None:
        chat = model.with_structured_output(Person, method=method, include_raw=True)
        for found in (chat.invoke("Ann is 30."), await chat.ainvoke("Ann is 30.")):
            assert found["parsing_error"] is None and isinstance(found["parsed"], Person)
            assert found["raw"].response_metadata["inferscale"]["missed"] == []

    async def test_a_call_that_is_asked_for_comes_each_way(self, model: ChatInferScale) -> None:
        forced = model.bind_tools([get_weather, get_time], tool_choice="any", max_tokens=64)
        for answer in await each_way(forced, "What is the weather in Oslo?"):
            [call] = answer.tool_calls
            assert call["name"] in ("get_weather", "get_time") and answer.invalid_tool_calls == []

    def test_another_model_is_refused(self, model: ChatInferScale) -> None:
        assert model.invoke("Hello", model=model.model_name).response_metadata["model_name"] == model.model_name
        with pytest.raises(InputError, match="open another engine"):
            model.invoke("Hello", model="another/model")

    def test_a_prompt_that_does_not_fit_is_refused_by_name(self, model: ChatInferScale) -> None:
        with pytest.raises(PromptTooLongError):
            model.invoke("word " * 10_000)
