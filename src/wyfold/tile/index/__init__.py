"""Tokens to tiles and back."""
