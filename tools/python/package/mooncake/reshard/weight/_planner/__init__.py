"""Plan of the copies that bring tensors from one placement into another."""
