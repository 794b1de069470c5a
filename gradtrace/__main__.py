"""Run the command line as ``python -m gradtrace``."""

from gradtrace.cli.main import main

if __name__ == "__main__":
    main()
