"""`python -m shardwright`: the command line."""

from shardwright.cli import main

if __name__ == "__main__":
    main()
