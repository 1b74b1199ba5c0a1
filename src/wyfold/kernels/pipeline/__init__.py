"""What Gluon kernels share that pass the chunks of a sequence through a ring of shared-memory stages."""
