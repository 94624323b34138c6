"""`python -m slot_cache` is the command line `slot-cache`."""

from slot_cache.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
