"""Engines: one interface for text generation, one for features; vLLM for speed, transformers as the reference."""

from prm.inference.engines.base import EngineError, FeatureEngine, GenerateEngine, Generation, GenerationRequest

__all__ = ["EngineError", "FeatureEngine", "GenerateEngine", "Generation", "GenerationRequest"]
