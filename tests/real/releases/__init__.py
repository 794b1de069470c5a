"""Run the catalog on other releases of DeepSpeed: python -m tests.real.releases."""
