"""Reports from the trackers of DeepSpeed and accelerate, run again and explained: see docs/cases/."""
