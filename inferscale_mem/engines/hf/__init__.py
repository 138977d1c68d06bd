"""What the transformers engine is made of: model, ropes, records, sampling, guided decoding."""
