"""Bring tracing into scripts and frameworks that nobody edits."""
