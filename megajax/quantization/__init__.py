"""Post-training quantisation of a run: calibration with text, a folder in 8 bits for vLLM (docs/quantization.md)."""
