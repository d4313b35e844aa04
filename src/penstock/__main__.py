"""``python -m penstock``: as the ``penstock`` command, where that is not on the path."""

from penstock.runtime.cli import main

if __name__ == "__main__":
    main()
