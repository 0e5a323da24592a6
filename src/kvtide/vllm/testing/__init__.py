"""vLLM's real schedulers around the production connector, without a model."""

from kvtide.vllm.testing.engine import ModelEngine
from kvtide.vllm.testing.harness import Harness
from kvtide.vllm.testing.promises import WrongBytesError
from kvtide.vllm.testing.shape import EngineShape, Runner, Siblings

__all__ = ["EngineShape", "Harness", "ModelEngine", "Runner", "Siblings", "WrongBytesError"]
