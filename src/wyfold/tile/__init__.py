"""The vocabulary of the kernels: a tile function is one mathematical step, on the device and as an eager twin."""
