"""Where vLLM notes who uses it."""

from enum import Enum


class UsageContext(Enum):
    """One of its values."""

    OPENAI_API_SERVER = 1
