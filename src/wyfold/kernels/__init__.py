"""Launches: each folder is one, with a contract and an implementation per backend."""
