"""Twenty turns with other memories in each: what every turn computes, next to what is new in it."""

from __future__ import annotations

from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage

from inferscale_mem import ChatInferScale, InferScaleMemory

TURNS = 20
FACTS = [
    f"My {thing} number {n} is {colour}." for n in range(4) for thing in ("car", "hat") for colour in ("red", "blue")
]


def main(memory: InferScaleMemory) -> list[tuple[int, int]]:
    """Talk, print the table, and return (tokens new in the turn, tokens computed) for each turn."""
    for fact in FACTS:
        memory.add(fact, user_id="alice", infer=False)
    memory.service.wait(300)
    chat = ChatInferScale(memory=memory, temperature=0, max_tokens=24, memory_position="latest")
    talk: list[BaseMessage] = [SystemMessage("You are kind.")]
    known, rows = 0, []
    print(f"{'turn':>4} {'prompt':>7} {'facts':>6} {'new':>5} {'computed':>9} {'ratio':>6}")
    for turn in range(TURNS):
        question = f"Question {turn}: what do you know of my {FACTS[turn % len(FACTS)].split()[1]}?"
        talk.append(HumanMessage(question))
        total = chat.get_num_tokens_from_messages(talk)  # of the conversation alone
        hits = memory.search(question, filters={"user_id": "alice"}, top_k=3 + turn % 3)
        answer = chat.invoke(talk, memories=hits)
        report = answer.response_metadata["inferscale"]
        new, computed = total - known, report["tokens_prefilled"]
        known = total
        rows.append((new, computed))
        prompt = report["tokens_injected"] + computed
        print(
            f"{turn:4} {prompt:7} {report['facts_injected']:6} {new:5} {computed:9} {computed / new:6.2f}", flush=True
        )
        talk.append(answer)
    return rows


if __name__ == "__main__":
    with InferScaleMemory() as memory:  # encoding.text_tail is 0 by default: all facts are injected
        main(memory)
