"""`python -m kvtier`."""

from kvtier.cli import main

if __name__ == "__main__":
    main()
