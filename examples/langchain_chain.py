"""A plain LangChain chain: search, put the handles into the system message, stream the answer."""

from __future__ import annotations

from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable

from inferscale_mem import ChatInferScale, InferScaleMemory


def chain(memory: InferScaleMemory, user_id: str) -> Runnable[dict[str, str], object]:
    """From a question to the model's answer."""

    def recall(given: dict[str, str]) -> str:
        hits = memory.search(given["question"], filters={"user_id": user_id}, top_k=5)
        return "\n".join(f"- {hit['memory']}" for hit in hits["results"])

    prompt = ChatPromptTemplate.from_messages(
        [("system", "You know the user. Memories:\n{memories}"), ("human", "{question}")]
    )
    chat = ChatInferScale(memory=memory, user_id=user_id, temperature=0, max_tokens=60)
    return {"memories": recall, "question": lambda given: given["question"]} | prompt | chat


def main(memory: InferScaleMemory) -> None:
    """Remember something, and ask for it."""
    memory.add("My dog is called Rex.", user_id="alice", infer=False)
    memory.service.wait(60)
    for chunk in chain(memory, "alice").stream({"question": "What is the name of my dog?"}):
        print(chunk.content, end="", flush=True)
    print()


if __name__ == "__main__":
    memory = InferScaleMemory()
    main(memory)
    memory.close()
