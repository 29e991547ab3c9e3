"""The paper's figures and numbers, from the simulator."""
