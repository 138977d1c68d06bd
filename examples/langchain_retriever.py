"""A retriever in the usual RAG chain: documents hold handles, which are injected where the context stands."""

from __future__ import annotations

from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough

from inferscale_mem import ChatInferScale, InferScaleMemory, InferScaleRetriever


def joined(documents: list[Document]) -> str:
    """The documents, a line each."""
    return "\n".join(document.page_content for document in documents)


def main(memory: InferScaleMemory) -> None:
    """Remember two things, and ask."""
    for said in ("My dog is called Rex.", "I drink tea without milk."):
        memory.add(said, user_id="alice", infer=False)
    memory.service.wait(60)
    retriever = InferScaleRetriever(memory=memory, user_id="alice", k=2)
    prompt = ChatPromptTemplate.from_messages([("system", "Answer from this:\n{context}"), ("human", "{question}")])
    chat = ChatInferScale(memory=memory, temperature=0, max_tokens=60)
    rag = {"context": retriever | joined, "question": RunnablePassthrough()} | prompt | chat
    answer = rag.invoke("How do I drink my tea?")
    print(answer.content, answer.response_metadata["inferscale"])


if __name__ == "__main__":
    memory = InferScaleMemory()
    main(memory)
    memory.close()
