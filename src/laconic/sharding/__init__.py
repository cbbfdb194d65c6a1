"""Trainable parameters as one flat vector, cut among ranks that own a part of it each."""
