"""The benchmark: ipufit beside its peers on the same work. `nox -s bench`; docs/benchmarks.md."""
