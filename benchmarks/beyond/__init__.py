"""What lies beyond the paper's design points, simulated before it is built."""
