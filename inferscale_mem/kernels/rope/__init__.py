"""Rotary position embedding: turning keys by a cosine and a sine per position and pair of channels."""
