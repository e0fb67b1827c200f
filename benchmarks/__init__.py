"""fsdp_compile beside its peers: `python -m benchmarks.train_step` and `python -m benchmarks.boundary`."""
