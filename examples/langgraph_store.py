"""A LangGraph graph with a store: values stay JSON, and what a search finds is injected."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import HumanMessage
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.store.base import BaseStore

from inferscale_mem import ChatInferScale, InferScaleMemory, InferScaleStore

HOME = ("memories", "alice")


def main(memory: InferScaleMemory) -> None:
    """Store two things about alice, and let a node answer from them."""
    chat = ChatInferScale(memory=memory, temperature=0, max_tokens=60)

    def answer(state: MessagesState, *, store: BaseStore) -> dict[str, Any]:
        hits = store.search(HOME, query=state["messages"][-1].text, limit=3)
        return {"messages": [chat.invoke(state["messages"], memories=hits)]}

    store = InferScaleStore(memory, namespace=("memories", "{user_id}"))
    graph = StateGraph(MessagesState).add_node("answer", answer).add_edge(START, "answer").compile(store=store)
    store.put(HOME, "dog", {"content": "My dog is called Rex.", "source": "chat"}, index=["content"])
    store.put(HOME, "tea", {"content": "I drink tea without milk.", "source": "chat"}, index=["content"])
    memory.service.wait(60)
    question = {"messages": [HumanMessage("What is the name of my dog?")]}
    last = graph.invoke(question, {"configurable": {"user_id": "alice"}})["messages"][-1]
    print(last.text, last.response_metadata["inferscale"])


if __name__ == "__main__":
    memory = InferScaleMemory()
    main(memory)
    memory.close()
