"""vLLM's real scheduler around the production connector, without a model."""

from kvtide.vllm.testing.harness import Harness, WrongBytesError

__all__ = ["Harness", "WrongBytesError"]
