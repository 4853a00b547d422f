"""Terrella trains world models, and the agents that live in them, with RL from verifiable rewards."""

__version__ = "0.1.0"
