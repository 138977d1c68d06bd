"""An agent whose middleware recalls before each model call and remembers what was said."""

from __future__ import annotations

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage

from inferscale_mem import ChatInferScale, InferScaleMemory, InferScaleMemoryMiddleware


def today() -> str:
    """The day of the week."""
    return "Tuesday"


def main(memory: InferScaleMemory) -> None:
    """Two turns of two people; each is told only what is theirs."""
    agent = create_agent(
        ChatInferScale(memory=memory, temperature=0, max_tokens=60),
        tools=[today],
        middleware=[InferScaleMemoryMiddleware(memory, add=True, infer=False)],
    )
    for user, said in (("alice", "My dog is called Rex."), ("bob", "My cat is called Tom."), ("alice", "Who is Rex?")):
        answer = agent.invoke({"messages": [HumanMessage(said)]}, {"configurable": {"user_id": user}})
        memory.service.wait(60)
        last = answer["messages"][-1]
        print(
            f"{user}: {said}\n  {last.text}\n  facts injected: {last.response_metadata['inferscale']['facts_injected']}"
        )


if __name__ == "__main__":
    memory = InferScaleMemory()
    main(memory)
    memory.close()
