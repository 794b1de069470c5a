"""Find out what gradtrace can trace on this machine: build engines for real, and trace a step."""
