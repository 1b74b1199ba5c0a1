"""Sigmoid, SiLU and softplus with position-independent bits."""
