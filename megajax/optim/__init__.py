"""Optimizer update, learning-rate schedule, and where the optimizer state lies."""
