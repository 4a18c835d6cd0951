"""`python -m kvtier.server` is `kvtier-server`."""

from kvtier.server.cli import main

if __name__ == "__main__":
    main()
