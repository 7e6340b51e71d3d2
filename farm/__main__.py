"""`python -m farm`: the command line."""

from farm.cli import main

if __name__ == "__main__":
    main()
