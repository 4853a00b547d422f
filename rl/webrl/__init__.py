"""WebRL: prompts, trajectories, replay, advantages, the outcome reward model and new instructions, all as plain
functions.
"""
