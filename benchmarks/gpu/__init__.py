"""What one GPU does: checks and measurements that need no checkpoint, `python -m benchmarks.gpu.run_all`."""
