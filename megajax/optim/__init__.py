"""Optimizer update, learning-rate schedule, and sharding of the optimizer state."""
