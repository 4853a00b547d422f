"""The name under which verifiers finds our worlds: its plugins are top-level packages, and its ids are their names."""

from terrella.rl.exchange.to_verifiers import ChatHarness, WorldsEnv, WorldTaskset

__all__ = ["ChatHarness", "WorldTaskset", "WorldsEnv"]
