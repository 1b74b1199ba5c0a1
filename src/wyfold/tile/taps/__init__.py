"""Causal depthwise filters of a few taps."""
