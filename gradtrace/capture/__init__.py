"""Record a training run: probes, the step clock, snapshots, the writer thread. Needs torch."""
