"""User code, a reward or an environment named by path, in a child process that can be killed at a deadline."""

from .host import CHECKING_S, LOADING_S, Host
from .wire import Sealed

__all__ = ["CHECKING_S", "LOADING_S", "Host", "Sealed"]
