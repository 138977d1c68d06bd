"""Top-k: the embeddings of one scope that are most similar to a query."""
