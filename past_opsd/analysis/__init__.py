"""Looking at runs: probes, causal shift, theory, suites, the report, benchmarks."""
