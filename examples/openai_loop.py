"""Mem0's README loop with the plain ``openai`` client: memory and model are on an ``inferscale-mem serve``.

    inferscale-mem serve                          # in one terminal
    python examples/openai_loop.py                # in another, same INFERSCALE_HOME (or INFERSCALE_HANDLE_KEY)

Against Mem0 and OpenAI themselves, the loop is the same but for the class and ``base_url``.
"""

from __future__ import annotations

import os
import sys

from openai import OpenAI

from inferscale_mem import InferScaleMemory

BASE_URL = os.environ.get("INFERSCALE_BASE_URL", "http://127.0.0.1:8000/v1")

memory = InferScaleMemory(inferscale={"engine": {"base_url": BASE_URL}})
client = OpenAI(base_url=BASE_URL, api_key=os.environ.get("INFERSCALE_API_KEY", "none"))
model = client.models.list().data[0].id


def chat_with_memories(message: str, user_id: str = "default_user") -> str:
    """Mem0's own: search, put what was found into the system prompt, ask."""
    found = memory.search(query=message, filters={"user_id": user_id}, top_k=3)
    memories = "\n".join(f"- {entry['memory']}" for entry in found["results"])
    system = (
        "You are a helpful AI. Answer the question based on query and memories.\n"
        f"User Memories:\n{memories}\nAnswer in one short sentence, using these memories."
    )
    messages = [{"role": "system", "content": system}, {"role": "user", "content": message}]
    answer = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=48)
    usage = answer.usage
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    report = answer.model_extra.get("inferscale", "no memories in the request")  # a search may have found nothing
    print(f"  [{usage.prompt_tokens} prompt tokens, {cached} not computed; {report}]")
    return answer.choices[0].message.content


def main() -> None:
    for fact in ("My dog is called Biscuit.", "I am allergic to walnuts.", "I work as a nurse in Oslo."):
        memory.add(fact, user_id="default_user", infer=False)
    memory.service.wait(60)
    asked = sys.argv[1:] or ["What is the name of my dog?", "What am I allergic to?"]
    for message in asked:
        print(f"You: {message}")
        print(f"AI: {chat_with_memories(message)}")
    memory.close()


if __name__ == "__main__":
    main()
