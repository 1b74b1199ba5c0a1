"""Context parallelism: the partition of tokens over ranks, and operators whose states pass between ranks."""
