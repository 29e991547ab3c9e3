"""Cached dLLM serving on GPUs that are not there: the live scheduler and router over a latency model."""
