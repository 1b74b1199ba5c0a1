"""Kernels: each folder holds one stage, with its contract and one implementation per backend."""
