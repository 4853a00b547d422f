"""Weight sync from the trainer to a rollout engine: checksummed, versioned and retried; a partial transfer is
detected.
"""
