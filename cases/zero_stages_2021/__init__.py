"""DeepSpeed issue 1488: losses of ZeRO-0, 1, 2 and 3 differ when gradients are accumulated."""
