"""Weights from the trainer to a rollout engine: checksummed, versioned, retried, and never half taken for whole."""
