"""Replay real bugs of DeepSpeed on the releases that have them: python -m tests.replay."""
